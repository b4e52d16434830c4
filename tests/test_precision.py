from __future__ import annotations

from threading import Event, Thread
from typing import get_args

import pytest
import torch

from vqclip.errors import ConfigError
from vqclip.losses import ContrastiveConfig
from vqclip.precision import AUTOCAST_DTYPES, Precision, autocast, full_precision, without_tf32

CPU = torch.device("cpu")


def product_type() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("precision", get_args(Precision))
def test_autocast_is_on_for_half_precision_alone(precision):
    with torch.autocast("cpu", torch.bfloat16), autocast(CPU, precision):
        assert product_type() == AUTOCAST_DTYPES.get(precision, torch.float32)


def test_full_precision_within_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert product_type() == torch.bfloat16
        with full_precision(CPU):
            assert product_type() == torch.float32
    with full_precision(torch.device("meta")):  # which has no autocast
        pass


def test_unknown_precision():
    with pytest.raises(ConfigError, match="precision: got 'int8'; expected one of fp32, bf16, fp16, fp64"):
        autocast(CPU, "int8")


def precisions():
    backends = torch.backends
    owners = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    return [owner.fp32_precision for owner in owners]


@pytest.fixture
def as_before():
    owner, before = torch.backends, precisions()
    yield
    owner.fp32_precision = "none"
    for each, precision in zip(
        (owner.cuda.matmul, owner.cudnn.conv, owner.mkldnn.matmul, owner.mkldnn.conv), before, strict=True
    ):
        each.fp32_precision = precision
    assert precisions() == before


def set_as_before_torch_2_9():
    torch.set_float32_matmul_precision("medium")


def set_for_products():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_for_all():
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize("change", [lambda: None, set_as_before_torch_2_9, set_for_products, set_for_all])
def test_tf32_is_off_within_and_as_before_after(change, as_before):
    change()
    found = precisions()
    assert "tf32" in found
    with without_tf32(torch.device("cuda")):
        assert not {"tf32", "bf16"} & set(precisions()[:2])
        assert precisions()[2:] == found[2:]
        with without_tf32(CPU):
            assert not {"tf32", "bf16"} & set(precisions())
    assert precisions() == found
    if change is set_for_all:  # what no setting of its own has still follows the one for all
        torch.backends.fp32_precision = "ieee"
        assert precisions()[2] == "ieee"


def test_tf32_is_off_as_long_as_any_thread_is_within(as_before):
    set_for_products()
    found, inside, leave = precisions(), Event(), Event()

    def stay():
        with without_tf32(CPU):
            inside.set()
            assert leave.wait(60)

    thread = Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    with without_tf32(CPU):
        pass
    assert precisions()[2] == "ieee"
    leave.set()
    thread.join(60)
    assert precisions() == found


def test_one_graph():
    """Not every question about autocast can be compiled."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        with full_precision(x.device):
            return x @ x

    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.ones(2, 2)).dtype == torch.float32


def test_losses_use_it_compiled():
    loss = torch.compile(ContrastiveConfig().build(), fullgraph=True, backend="eager")
    rows = torch.nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert torch.isfinite(loss(rows, rows, torch.tensor(10.0)))
