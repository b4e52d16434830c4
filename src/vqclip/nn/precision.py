"""Precision and mode of modules, tensors of their constants, and the memory of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
"""fp32 and fp64: computed in the dtype of the weights. bf16 and fp16: autocast, with weights in fp32."""

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of autocast; off for the other precisions."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return autocast for `precision`; for fp32 and fp64 autocast is off, also within a caller's autocast.

    Raises:
        ConfigError: unknown precision.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: got {precision!r}; expected one of {', '.join(get_args(Precision))}")
    dtype = AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return full_precision(device)
    # Within a caller's autocast not with its cache of cast weights, which may have another dtype, or no gradient.
    is_nested = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, dtype, cache_enabled=not is_nested and torch.is_autocast_cache_enabled())


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, for numbers that need more precision than bf16, such as codes and logits of 100.

    Does not change TF32, a setting of the process (`torch.set_float32_matmul_precision`; off by default).
    """
    # If autocast is off already, a context would only add a node to an exported graph.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the block, and restore the mode of each part after it."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


def constant(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor of the constants of a module, at each use.

    As a buffer that is not saved they would be whatever the memory held in a model that is built on `meta` and then
    loaded, as transformers, accelerate and FSDP2 do. The host waits for nothing: CUDA copies up to 64 KB at once.
    """
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a `torch.autograd.Function`: in full precision, also if it is called within autocast.

    Second derivatives are refused with a `ConfigError`: torch's ``once_differentiable`` returns 0 for a constant
    incoming gradient, which that of a loss is.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{backward.__qualname__.partition('.')[0].strip('_')}: got create_graph=True, expected False: this "
                "function has no second derivatives"
            )
        with full_precision(gradients[0].device):
            return backward(ctx, *gradients)

    return refusing


def gpu_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return None
