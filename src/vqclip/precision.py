"""What is computed in which floating-point type: the precision of a run, and islands of full precision in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

from vqclip.errors import ConfigError

__all__ = ["AUTOCAST_DTYPES", "Precision", "autocast", "full_precision", "without_tf32"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
"""fp32 and fp64: in the type of the weights. bf16 and fp16: under autocast, with the weights in fp32."""

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in; for the other precisions it is off."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Autocast as `precision` asks for; off for fp32 and fp64, within a caller's autocast as well.

    Raises:
        ConfigError: there is no such precision.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: got {precision!r}; expected one of {', '.join(get_args(Precision))}")
    dtype = AUTOCAST_DTYPES.get(precision)
    return full_precision(device) if dtype is None else torch.autocast(device.type, dtype)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off on any device that has it; for what bf16 has no digits for, such as codes and logits of 100.

    TF32 stays as the caller has set it (`torch.set_float32_matmul_precision`; off by default): that is for the process.
    """
    # Where it is off already, a context would only be one more node of a graph that is exported.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """`full_precision`, and float32 with all its digits in matrix products and convolutions on that kind of device.

    How many digits is a setting of the process: as long as any thread is within, all compute so, and torch's older
    names for it, such as ``torch.backends.cudnn.allow_tf32``, cannot be read. After that it is as it was before.
    """
    settings = _SETTINGS.get(device.type)
    with full_precision(device), nullcontext() if settings is None else settings.wide():
        yield


class _Settings:
    """Some of torch's settings of what float32 is computed in. Those that are wide already are not touched."""

    def __init__(self, *owners: Any):
        self._owners = owners
        self._former: list[tuple[Any, str]] = []
        self._within = 0
        self._lock = threading.Lock()

    @contextmanager
    def wide(self) -> Iterator[None]:
        with self._lock:
            if self._within == 0:
                every = ((owner, owner.fp32_precision) for owner in self._owners)
                self._former = [(owner, precision) for owner, precision in every if precision not in _WIDE]
                for owner, _ in self._former:
                    owner.fp32_precision = "ieee"
            self._within += 1
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if self._within == 0:
                    for owner, precision in self._former:
                        owner.fp32_precision = "none"  # as a setting above it says: what it says may be what was found
                        if owner.fp32_precision != precision:
                            owner.fp32_precision = precision


_WIDE = ("ieee", "none")
_BACKENDS: Any = torch.backends  # its stubs lack some of these
_SETTINGS = {
    "cuda": _Settings(_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv),
    "cpu": _Settings(_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv),
}
