from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from vqclip.errors import StopRequested
from vqclip.signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(number, capfd):
    with StopSignals() as stop:
        assert (stop.requested, stop.name) == (False, None)
        stop.require_going_on()
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.name) == (True, number.name)
        with pytest.raises(StopRequested):
            stop.require_going_on()
        os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat it
    assert stop.requested
    assert capfd.readouterr().err.count(f"{number.name}: stopping, to go on another time") == 1


def test_second_interrupt_is_the_usual_one(capfd):
    stop = StopSignals(notice=False)
    with pytest.raises(KeyboardInterrupt), stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_interrupt_after_sigterm_still_counts_as_the_first(capfd):
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    error = capfd.readouterr().err
    assert "SIGTERM: stopping" in error
    assert "SIGINT" not in error


def test_handlers_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), StopSignals():
        _ = 1 / 0


def test_other_signals_and_reuse():
    stop = StopSignals(signals=(signal.SIGUSR1,))
    with stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.requested
    with stop:
        assert not stop.requested


def test_other_threads_are_refused():
    errors = []

    def open_it() -> None:
        try:
            with StopSignals():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert "main one only" in errors[0]


def test_workers_ignore_the_signals_of_their_group():
    script = "import os, signal, sys; from vqclip.signals import ignore_stop_signals as f; f(); " + (
        "[os.kill(os.getpid(), getattr(signal, name)) for name in ('SIGTERM', 'SIGINT', 'SIGUSR1')]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr
