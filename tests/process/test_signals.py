from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from vqclip.errors import StopRequested
from vqclip.process.signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers_are_restored():
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(number, capfd):
    with StopSignals() as stop:
        assert (stop.requested, stop.reason) == (False, None)
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.reason) == (True, number.name)
        with pytest.raises(StopRequested):
            stop.raise_if_requested()
        os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat it
    assert stop.requested
    assert capfd.readouterr().err.count(f"{number.name}: stopping; the run can be resumed") == 1


def test_the_second_interrupt_is_the_usual_one(capfd):
    stop = StopSignals(notice=False)
    with pytest.raises(KeyboardInterrupt), stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the first one
        assert (stop.requested, stop.reason) == (True, "SIGTERM")
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_handlers_come_back_after_an_error_and_a_context_can_be_used_again():
    stop = StopSignals()
    with pytest.raises(ZeroDivisionError), stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGUSR1)
        _ = 1 / 0
    assert stop.requested
    with stop:
        assert not stop.requested


def test_another_thread_catches_nothing_and_can_be_asked():
    handlers, reasons = [], []

    def open_it() -> None:
        with StopSignals() as stop:
            handlers.extend(signal.getsignal(number) for number in STOP_SIGNALS)
            stop.request("pruned")
            stop.request("too late")
            with pytest.raises(StopRequested):
                stop.raise_if_requested()
            reasons.append(stop.reason)

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert (handlers, reasons) == (before, ["pruned"])


def test_workers_ignore_the_signals_of_their_group():
    script = (
        "import os; from vqclip.process.signals import STOP_SIGNALS, ignore_stop_signals; ignore_stop_signals(); "
        + ("[os.kill(os.getpid(), number) for number in STOP_SIGNALS]; print('alive')")
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr


def test_sighup_stays_ignored_under_nohup():
    script = "import os, signal; from vqclip.process.signals import StopSignals\nwith StopSignals() as stop: " + (
        "os.kill(os.getpid(), signal.SIGHUP); print(stop.requested)"
    )
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("launched", [True, False], ids=["by torchrun", "by a shell"])
def test_a_rank_stops_when_its_launcher_dies(launched):
    rank = """
import time
from vqclip.dist import launcher_has_died, stop_with_launcher
from vqclip.process.signals import StopSignals
stop_with_launcher()
with StopSignals() as stop:
    print("ready", flush=True)
    end = time.monotonic() + (30 if LAUNCHED else 0.5)
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    print(stop.reason, launcher_has_died(), flush=True)
""".replace("LAUNCHED", str(launched))
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    settings = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    settings |= {"TORCHELASTIC_RUN_ID": "x"} if launched else {}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        said, _ = process.communicate(timeout=60)  # until the rank has ended too
    assert said == ("SIGTERM True\n" if launched else "None False\n")
