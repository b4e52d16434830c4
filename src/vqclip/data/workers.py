"""Map a function over numbers in worker processes, in order, with readable errors."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from vqclip import dist
from vqclip.errors import ConfigError, DataError
from vqclip.process.signals import ignore_stop_signals
from vqclip.process.watchdog import dump_stacks_on_request

S = TypeVar("S")
T = TypeVar("T")

StartMethod = Literal["fork", "forkserver", "spawn"]

_CHECK_S = 1.0
"""Seconds between looks for dead workers while a result is awaited."""

_DEATH = re.compile("^DataLoader worker.*(exited unexpectedly|killed by signal)", re.DOTALL)
"""Message of torch about a worker that died."""

_TIMEOUT = re.compile("^DataLoader timed out")
"""Message of torch about a result that did not come in time."""

_NO_FILE = re.compile("Too many open files|unable to (open|allocate|resize) shared memory")
"""Messages of Python and torch about a limit of this process or machine."""

_running: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


class _Mapped(Dataset, Generic[S, T]):
    """Results by number; an error is sent as a result, since torch would hide its message in two tracebacks."""

    def __init__(self, function: Callable[[S], T]):
        self._function = function

    def __getitem__(self, number: S) -> T | DataError:
        try:
            return self._function(number)
        except DataError as error:
            return error
        except Exception as error:
            return DataError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}".rstrip())


def ordered_map(
    function: Callable[[S], T],
    numbers: Iterable[S],
    workers: int = 0,
    *,
    prefetch: int = 2,
    pin_memory: bool = False,
    timeout_s: float = 0,
    section: str = "data",
    start_method: StartMethod | None = None,
) -> Generator[T, None, None]:
    """Yield ``function(number)`` for all numbers in order, computed by torch's DataLoader.

    Uses no global random generator. Workers compute with one thread. They ignore the signals that ask to stop, which a
    launcher sends to the whole process group, and run until the process that reads from them ends.

    Args:
        function: must be picklable, with its arguments and results, where processes are not forked.
        numbers: arguments, such as a huge `range`; consumed when a worker gets its next task.
        workers: processes; 0 computes in this one when a result is needed.
        prefetch: results that each worker prepares in advance.
        pin_memory: copy results to page-locked memory (by their `pin_memory` method).
        timeout_s: longest wait for a worker; 0 waits forever.
        section: section of the configuration whose keys appear in messages.
        start_method: how processes are started. By default the method that the program has set, if it is not
            Python's own choice; otherwise ``fork`` on Linux: others take seconds, and each process then has a copy
            of the function and its data.

    Raises:
        ConfigError: there are workers, and this is a process of `multiprocessing.Pool`, which can start none.
        DataError: the function failed, or a worker died or took too long.
    """
    if workers and multiprocessing.current_process().daemon:
        raise ConfigError(
            f"{section}.workers: got {workers} in a daemonic process, such as one of multiprocessing.Pool, which can "
            "start no other; expected 0, or a process of concurrent.futures.ProcessPoolExecutor"
        )
    method = start_method or _default_method()
    if workers and method == "forkserver":
        multiprocessing.set_forkserver_preload(["__main__", "vqclip.data.fork_server"])
    loader: DataLoader[Any] = DataLoader(
        _Mapped(function),
        batch_size=None,
        sampler=numbers,
        collate_fn=_identity,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        multiprocessing_context=method if workers else None,
        pin_memory=pin_memory,
        timeout=_CHECK_S if workers else 0,
        worker_init_fn=_prepare_worker,
        generator=torch.Generator(),  # otherwise the workers' seed is drawn from the global generator
    )
    generator = _results(loader, timeout_s, section)
    _running.add(generator)
    return generator


def _default_method() -> str | None:
    """Return the start method that the program has set, or ``fork`` on Linux.

    Python's own choice (``forkserver`` from 3.14 on) looks like a set one as soon as anything has used it.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    is_pythons_choice = method in (None, multiprocessing.get_all_start_methods()[0])
    return "fork" if is_pythons_choice and sys.platform == "linux" else method


@contextlib.contextmanager
def explain_worker_deaths(section: str = "data") -> Iterator[None]:
    """Turn the death of a worker within the block into a `DataError`; for code that uses results of `ordered_map`.

    torch's handler of SIGCHLD raises its error wherever the main thread is at that moment, where other code, such as a
    collective, may wrap it in another error.

    Args:
        section: section of the configuration whose keys appear in the message.

    Raises:
        DataError: a worker died.
    """
    try:
        yield
    except Exception as error:
        death: BaseException | None = error
        while death is not None and not (isinstance(death, RuntimeError) and _DEATH.search(str(death))):
            death = death.__cause__ or death.__context__
        if death is None or isinstance(error, DataError):
            raise
        raise DataError(_explain(death, 0, section)) from error


@atexit.register
def _end_workers() -> None:
    """End workers before `multiprocessing` sends them SIGTERM, which they ignore, and waits for them forever.

    A generator is still open here mostly if it is in a frame of the traceback that ends the process.
    """
    for generator in list(_running):
        with contextlib.suppress(ValueError):  # it runs right now, in another thread
            generator.close()


def _results(loader: DataLoader[Any], timeout_s: float, section: str) -> Generator[Any, None, None]:
    others = set(multiprocessing.active_children())
    try:
        with explain_worker_deaths(section):  # one may die while the others are started
            results: Any = iter(loader)
    except BaseException as error:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # the iterator, which would end them, was not made
        if _NO_FILE.search(str(error)):
            raise DataError(_explain(error, timeout_s, section)) from error
        raise
    start = time.monotonic()
    try:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                waited = time.monotonic() - start
                if _TIMEOUT.search(str(error)) and not (timeout_s and waited >= timeout_s):
                    continue  # torch looks for dead workers, of any start method, whenever its own timeout ends
                raise DataError(_explain(error, timeout_s, section)) from error
            if isinstance(result, DataError):
                raise result
            yield result
            start = time.monotonic()
    finally:
        if loader.num_workers:
            # torch would wait until the iterator is collected, which a stored traceback prevents, and then ten seconds
            # for each stuck worker.
            try:
                results._shutdown_workers()  # DataLoader has no public method for it
            finally:
                for worker in results._workers:
                    worker.kill()


def _identity(result: T) -> T:
    return result


def _prepare_worker(worker: int) -> None:
    gc.freeze()  # objects of the parent: the collector would write to each, and so copy 65 MB of its memory
    # The worker ends with the process that reads from it, which under ``forkserver`` is not its system parent.
    # Otherwise a stuck one would keep its pipes and memory forever.
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    dist.signal_at_parent_death(signal.SIGKILL)  # at once, even while native code holds the interpreter lock
    torch.set_num_threads(1)
    ignore_stop_signals()
    dump_stacks_on_request()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _explain(error: BaseException, timeout_s: float, section: str) -> str:
    text = str(error)
    if _TIMEOUT.search(text):
        return f"no batch came from the data workers for {timeout_s:g} s: is the storage stuck? ({section}.timeout_s)"
    if _DEATH.search(text):
        return (
            f"a data worker died ({text.splitlines()[0]}). Was it killed for memory? Fewer {section}.workers need "
            "less, and so does less prefetching; too little shared memory (/dev/shm) has the same effect"
        )
    if _NO_FILE.search(text):
        return (
            f"data workers: {text}. Fewer {section}.workers need fewer open files and less shared memory; ulimit -n "
            "shows the limit, and docker run --shm-size sets that of shared memory"
        )
    return text
