import pytest
import torch

from tests.models import FSQ, RESIDUAL, built


@pytest.fixture
def saved(tmp_path):
    model = built(RESIDUAL, FSQ).eval()
    model.save_pretrained(tmp_path / "tokenizer")
    return model, tmp_path / "tokenizer"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
