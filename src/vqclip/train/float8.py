"""Linear layers of towers whose products are in 8-bit floating point (fp8), by `torchao`.

Each tensor is divided by its largest number on this process before it is rounded to fp8, in every forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vqclip.errors import ConfigError

__all__ = ["Float8Layers"]


class Float8Layers:
    """Linear layers that compute in fp8 within `applied`, with the same weights, and as before elsewhere.

    Args:
        towers: their linear layers that train are converted, if they have multiples of 16 inputs and outputs. Layers
            whose forward is not called, as in `nn.MultiheadAttention`, are left out.
        device: of the run.
        emulate: compute in fp32 with numbers rounded to fp8, on any device, for tests.

    Raises:
        ConfigError: the device has no products in fp8, torchao is missing, or there is no such layer.
    """

    def __init__(self, towers: Iterable[nn.Module], device: torch.device, emulate: bool = False):
        if not emulate:
            _require_device(device)
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            raise ConfigError(
                f"train.float8: fp8 needs the package torchao ({error}); install it with pip install 'vqclip[float8]'"
            ) from error
        config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
        places = [
            (parent, key, child)
            for tower in towers
            for parent in tower.modules()
            for key, child in parent.named_children()
            if type(child) is nn.Linear and child.weight.requires_grad
            if child.in_features % 16 == child.out_features % 16 == 0
        ]
        if not places:
            raise ConfigError(
                "train.float8: got true, but no tower that trains has a linear layer with multiples of 16 inputs and "
                "outputs; expected false"
            )
        twins = {child: convert_to_float8_training(child, config=config) for _, _, child in places}
        self._swaps = [(parent, key, child, twins[child]) for parent, key, child in places]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute in fp8 within the block."""
        try:
            for parent, key, child, twin in self._swaps:
                twin.training = child.training
                setattr(parent, key, twin)
            yield
        finally:
            for parent, key, child, _ in self._swaps:
                setattr(parent, key, child)


def _require_device(device: torch.device) -> None:
    found = "no GPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        found = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    raise ConfigError(
        f"train.float8: got true on {found}; expected a GPU that multiplies in fp8 (compute capability 8.9 or more: "
        "Ada, Hopper, Blackwell), or false"
    )
