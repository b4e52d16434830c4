"""Tensors that are on a GPU as far as torch can tell, on a machine without one, and whose values are real.

    with fake_cuda():
        x = torch.randn(2, 3, device=GPU)
        x @ torch.randn(3, 4)                   # raises: a tensor of the CPU among those of the GPU
        x.cpu()                                 # raises: the host would wait for the GPU
        (x @ x.T).sum().item()                  # a real number

A tensor is a fake one of `FakeTensorMode`, which knows its device and lets no operator mix devices. Beside it is a twin
on the CPU with its values, and each operator runs on both. So the host reads true numbers, and code that depends on
them runs as on a GPU: k-means, replacement of dead codes, rows chosen by a mask.

Not seen: kernels that CUDA lacks, and the order of work on several streams. Activations are recomputed without
autocast, so recompute them in fp32 only.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    _DISPATCH_META_HANDLERS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
MEMORY = 80 * 2**30
"""Bytes of the GPU."""
_DEVICE = torch.ops.prim.device.default
_COPY, _TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default


class FakeGpu(TorchDispatchMode):
    """Run each operator on fake tensors, which checks devices, and on their twins, which computes the values.

    Attributes:
        reads: how often the host has read values of the GPU, for which it waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self._autocasts, self._in_backward, self._is_below_autograd = False, False, False
        self._run_backward, self._set_autocast = torch.autograd._engine_run_backward, torch.set_autocast_enabled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return self.device_in_cpp(args)
        tensors: list[Tensor] = []
        args, kwargs = _map((args, kwargs or {}), lambda each: _on_gpu(each, tensors))
        _require_one_device(func, tensors, kwargs)
        twin_args, twin_kwargs = _map((args, kwargs), _on_cpu)
        with unset_fake_temporarily():
            real = _compute(func, *twin_args, **twin_kwargs)
        if func.namespace == "profiler":
            return real
        try:
            with self._below_autograd():
                fake = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # a number, or shapes depend on values
            device = FakeTensor._find_common_device(func, tensors)[0]
            self.reads += device == GPU
            fake = _map(real, lambda each: torch.empty_like(each, device=device) if isinstance(each, Tensor) else each)
        self._join(fake, real, torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
        return fake

    def _join(self, fake: Any, real: Any, in_graph: bool) -> None:
        if isinstance(fake, (tuple, list)):
            for pair in zip(fake, real, strict=True):
                self._join(*pair, in_graph)
        elif isinstance(fake, Tensor) and fake.shape == real.shape:  # side results differ between CPU and CUDA
            assert fake.dtype == real.dtype
            fake.twin = real
            if in_graph:
                fake.former_node = fake.grad_fn  # autograd will set another one

    # C++ code of torch sees tensors on `meta` in place of the GPU, because autograd would ask the driver about the GPU.
    # Autocast must see the GPU: in all tensors but those that are becoming an output or a leaf of the graph.

    def device_in_cpp(self, args: Any) -> torch.device:
        """Return the device of a tensor that C++ code asks for."""
        (tensor,) = args
        if tensor.fake_mode.in_kernel_invocation:
            return META
        if tensor.fake_device != GPU or self._is_below_autograd:
            return tensor.fake_device
        is_output = getattr(tensor, "former_node", self) is tensor.grad_fn
        is_leaf = tensor.requires_grad and tensor.is_leaf and not hasattr(tensor, "accumulator")
        becomes_node = torch.is_grad_enabled() and (is_output or is_leaf)
        return META if self._in_backward or not self._autocasts or becomes_node else GPU

    @contextmanager
    def _below_autograd(self) -> Iterator[None]:
        before, self._is_below_autograd = self._is_below_autograd, True
        try:
            yield
        finally:
            self._is_below_autograd = before

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run autograd."""
        before, self._in_backward = self._in_backward, True
        try:
            return self._run_backward(*args, **kwargs)
        finally:
            self._in_backward = before

    def set_autocast(self, device: str, enabled: bool) -> None:
        """Switch autocast; in a kernel of autocast torch itself says that it is off."""
        self._autocasts = enabled if device == GPU.type else self._autocasts
        self._set_autocast(device, enabled)


@contextmanager
def fake_cuda() -> Iterator[FakeGpu]:
    """Have a GPU within the block; modules are moved to it with ``module.to(GPU)``."""
    gpu = FakeGpu()
    patches = {
        # Asked of the driver.
        "torch.cuda.get_device_properties": lambda _: SimpleNamespace(total_memory=MEMORY),
        "torch.cuda.is_bf16_supported": lambda: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,  # by autocast and the gradient scaler
        # Streams and events. The stream of copies is patched where it is cached.
        "vqclip.train.tasks.base._copy_stream": lambda _: None,
        "torch.cuda.current_stream": lambda _: SimpleNamespace(wait_stream=lambda _: None),
        "torch.cuda.stream": lambda _: nullcontext(),
        "torch.cuda.Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        "torch.Tensor.record_stream": lambda *_: None,
        # See `FakeGpu`.
        "torch.nn.Module._apply": _apply,
        "torch.set_autocast_enabled": gpu.set_autocast,
        "torch.autograd._engine_run_backward": gpu.run_backward,
    }
    is_cuda = property(lambda each: each.device == GPU)
    with ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", is_cuda, create=True))
        stack.enter_context(mock.patch.dict(_DISPATCH_META_HANDLERS, {_DEVICE: gpu.device_in_cpp}))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(gpu)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move a module as `nn.Module._apply` does, which refuses to swap fake parameters."""
    for each in module.children() if recurse else ():
        each._apply(fn)
    for name, each in module._parameters.items():
        if each is not None:
            module._parameters[name] = moved = nn.Parameter(fn(each.detach()))
            moved.accumulator = moved.view_as(moved).grad_fn.next_functions[0][0]
            moved.requires_grad_(each.requires_grad)
    for name, each in module._buffers.items():
        module._buffers[name] = None if each is None else fn(each)
    return module


def _require_one_device(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
    """Refuse what `FakeTensorMode` lets pass: numbers of the CPU among tensors of the GPU, and copies that wait."""
    devices = {each.device for each in tensors}
    target = tensors[0].device if func is _COPY else kwargs.get("device") or (tensors[0].device if tensors else CPU)
    if func in (_COPY, _TO_COPY):
        if GPU in devices and target == CPU and not kwargs.get("non_blocking"):
            raise RuntimeError(f"{func}: copies a tensor from the GPU, for which the host waits")
    elif len(devices) > 1:
        raise RuntimeError(f"{func}: got tensors of {', '.join(sorted(map(str, devices)))}; expected one device")
    if target == GPU and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: got a generator of the CPU for a tensor of the GPU")


def _map(given: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(given, (tuple, list)):
        return type(given)([_map(each, fn) for each in given])
    return {name: _map(each, fn) for name, each in given.items()} if isinstance(given, dict) else fn(given)


def _on_gpu(given: Any, tensors: list[Tensor]) -> Any:
    """Return the GPU for the device that C++ code sees; collect tensors."""
    if isinstance(given, Tensor):
        tensors.append(given)
    return GPU if isinstance(given, torch.device) and given in (META, torch.device("cuda")) else given


def _on_cpu(given: Any) -> Any:
    """Return the twin of a tensor, and the CPU for a GPU."""
    if isinstance(given, FakeTensor):
        return given.twin
    return CPU if isinstance(given, torch.device) else given


def _compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU, which has no kernel for the softmax of fp16 in fp32."""
    aten = torch.ops.aten
    if func in (aten._softmax.default, aten._log_softmax.default) and args[2]:
        return func(args[0].float(), args[1], False)
    if func in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        return func(*args[:3], args[0].dtype).to(args[3])
    return func(*args, **kwargs)
