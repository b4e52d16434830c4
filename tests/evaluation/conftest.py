import pytest
import torch


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
