"""What is computed in which floating-point type: the precision of a run, and islands of full precision in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch

from vqclip.errors import ConfigError

__all__ = ["AUTOCAST_DTYPES", "Precision", "autocast", "first_derivative_only", "full_precision"]

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


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a `torch.autograd.Function` to refuse second derivatives with a `ConfigError`.

    torch's ``once_differentiable`` lets one pass as 0 where the incoming gradient is a constant, as that of a loss is.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                f"{backward.__qualname__.partition('.')[0].strip('_')}: got create_graph=True, expected False: this "
                "function has no second derivatives"
            )
        return backward(ctx, *gradients)

    return refusing
