import pytest
import torch

from tests.models import WIDE_LFQ, tiny_model


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run with an untrained model of so many bits that no two inputs share their codes."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tiny_model(WIDE_LFQ, WIDE_LFQ).build().save_pretrained(folder / "tokenizer")
    return folder
