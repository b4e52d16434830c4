"""Stop signals, turned into a flag that the training loop reads between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from vqclip.errors import StopRequested

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Schedulers send SIGUSR1 some time before the end (Slurm's `--signal`); a terminal that closes sends SIGHUP."""


class StopSignals:
    """Context in which SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag instead of ending the process.

        with StopSignals() as stop:
            for batch in loader:
                train_step(batch)
                if dist.any_rank(stop.requested):  # the ranks receive a signal at different times
                    break

    An ignored SIGHUP stays ignored, as under `nohup`. A second SIGINT (Ctrl-C pressed again) raises `KeyboardInterrupt`
    as usual; the other signals may be repeated. The end of the context restores the previous handlers. Python delivers
    signals to the main thread only: in another thread the context catches none, and `request` alone sets the flag. A
    process forked inside inherits the handlers: see `ignore_stop_signals`.

    Args:
        notice: print on stderr that the signal was received; True on one rank only.
    """

    def __init__(self, notice: bool = True) -> None:
        self._notice = notice
        self._before: dict[signal.Signals, Any] = {}
        self.reason: str | None = None
        """Name of the first signal, such as ``"SIGTERM"``, or the reason of the first request; None before both."""

    @property
    def requested(self) -> bool:
        """True after the first signal or request."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop as a signal does, from any thread.

        Args:
            reason: reason in a few words.
        """
        self.reason = self.reason or reason or "requested"

    def raise_if_requested(self) -> None:
        """Stop the current work if this process has received a signal or a request.

        Raises:
            StopRequested: it has received one.
        """
        if self.requested:
            raise StopRequested

    def __enter__(self) -> StopSignals:
        self.reason = None
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back; the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = " (Ctrl-C again: stop at once)" if number == signal.SIGINT else ""
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if self.reason is None:
            self.reason = signal.Signals(number).name
            if self._notice:
                # Not through logging or print: the signal may have interrupted one of their writes.
                with contextlib.suppress(OSError):  # stderr may be closed
                    os.write(2, f"\n{self.reason}: stopping; the run can be resumed{again}\n".encode())


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` in this process; for data loader workers and the like.

    A launcher signals the whole process group, and the rank still needs its workers until it has saved.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
