"""Background writing: host memory for copies of tensors, and a thread that writes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Staging:
    """Staging buffers in host memory, reused by the next copy because new memory costs more than the copy.

    The idea is that of torch's asynchronous distributed checkpoints.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous copies on the CPU, bit for bit; the next call overwrites them.

        Waits for the device, once.
        """
        self._held = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return dict(self._held)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Writer:
    """Thread that runs one job at a time, so that the training does not wait for the disk.

    Its errors are raised by the next `write`, `raise_if_failed` or `wait`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def write(self, work: Callable[[], object]) -> None:
        """Start a job; `wait` for the previous one first.

        Args:
            work: the job. It must not use collectives or anything that the training changes.
        """
        assert self._running is None, "the previous job may still run"

        def run_and_log() -> None:
            begun = time.perf_counter()
            work()
            logger.debug("checkpoint written in %.2f s", time.perf_counter() - begun)

        self._running = self._thread.submit(run_and_log)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed job, without waiting for one that is still running.

        Raises:
            CheckpointError: the job has failed.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of the job, if there is one.

        Raises:
            CheckpointError: the job has failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self, failed: bool) -> None:
        """Wait for the job, and end the thread.

        Args:
            failed: another error is being raised; an error of the job is only logged.

        Raises:
            CheckpointError: the job has failed.
        """
        try:
            self.wait()
        except Exception:
            if not failed:
                raise
            logger.exception("the last checkpoint could not be written")
        finally:
            self._thread.shutdown()
