import pytest
import torch

from tests.models import FSQ, RESIDUAL, tiny_model


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = tiny_model(RESIDUAL, FSQ).build().eval()
    model.save_pretrained(tmp_path / "tokenizer")
    return model, tmp_path / "tokenizer"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
