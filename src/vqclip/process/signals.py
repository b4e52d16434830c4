"""Signals that ask a run to stop, turned into a flag that the training loop reads between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from vqclip.errors import StopRequested

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Schedulers send SIGUSR1 some time before the end (Slurm's `--signal`); a terminal that closes sends SIGHUP."""


class StopSignals:
    """While this context is open, SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag instead of ending the process.

        with StopSignals() as stop:
            for batch in loader:
                train_step(batch)
                if dist.any_rank(stop.requested):  # one rank may have got the signal a step before the others
                    break

    SIGHUP stays ignored where it was before, as under `nohup`.
    A second SIGINT (Ctrl-C pressed again) raises `KeyboardInterrupt` as usual; the others may come any number of times.
    On leaving, the handlers from before are back, whatever happened inside. Only the main thread may open it. A
    process forked inside inherits the handlers: see `ignore_stop_signals`.

    Args:
        signals: The signals to catch.
        notice: Say on stderr that the signal was heard; for one rank of many.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS, notice: bool = True) -> None:
        self._signals = signals
        self._notice = notice
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def name(self) -> str | None:
        """That of the first signal that has come, such as ``"SIGTERM"``; None before."""
        return None if self._received is None else self._received.name

    def raise_if_requested(self) -> None:
        """Leave what is going on if a signal has come to this process.

        Raises:
            StopRequested: it has.
        """
        if self.requested:
            raise StopRequested

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopSignals was opened in another thread; Python delivers signals to the main one only")
        self._received = None
        for number in self._signals:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back; the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = " (Ctrl-C again: stop at once)" if number == signal.SIGINT else ""
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if self._received is None:
            self._received = signal.Signals(number)
            if self._notice:
                # Not through logging or print: the signal may have come in the middle of one of their writes.
                with contextlib.suppress(OSError):  # stderr may be closed
                    os.write(2, f"\n{self._received.name}: stopping, to go on another time{again}\n".encode())


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` in this process; for helpers such as data loader workers.

    A launcher signals the whole process group: the workers must live on until the rank that reads from them has saved.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
