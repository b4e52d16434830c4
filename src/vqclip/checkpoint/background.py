"""Writing beside the training: host memory to copy to, and a thread that writes what was copied."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Staging:
    """Memory of the host for copies of tensors, kept from one copy to the next: fresh memory costs more than copying.

    (The idea of a staging buffer is that of torch's asynchronous distributed checkpoints.)
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies on the CPU, bit for bit; they stay as they are until the next call, which overwrites them.

        Waits for the device, once.
        """
        self._held = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return dict(self._held)

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Writer:
    """A thread that does one piece of work at a time, so that the training need not wait for the disk.

    What goes wrong in it is raised by the next `write`, `raise_if_failed` or `wait`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def write(self, work: Callable[[], object]) -> None:
        """Begin; `wait` must have been called since the last time.

        Args:
            work: may use no collective, and nothing that the training changes.
        """
        assert self._running is None, "the former work may still run"

        def timed() -> None:
            begun = time.perf_counter()
            work()
            logger.debug("checkpoint written in %.2f s", time.perf_counter() - begun)

        self._running = self._thread.submit(timed)

    def raise_if_failed(self) -> None:
        """Raise the error of failed work, without waiting for work that still runs.

        Raises:
            CheckpointError: the work has failed.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of what was begun, if anything.

        Raises:
            CheckpointError: the work has failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self, failed: bool) -> None:
        """Wait, and end the thread.

        Args:
            failed: another error is on its way: one of the work is only logged.

        Raises:
            CheckpointError: the work has failed.
        """
        try:
            self.wait()
        except Exception:
            if not failed:
                raise
            logger.exception("the last checkpoint could not be written")
        finally:
            self._thread.shutdown()
