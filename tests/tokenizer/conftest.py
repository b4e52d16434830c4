import pytest

from tests.models import FSQ, RESIDUAL, built


@pytest.fixture
def saved(tmp_path):
    model = built(RESIDUAL, FSQ).eval()
    model.save_pretrained(tmp_path / "tokenizer")
    return model, tmp_path / "tokenizer"
