"""The watchdog of one process; tests/faults has those of whole jobs."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vqclip import dist
from vqclip.errors import DistributedError, StopRequested
from vqclip.evaluation.encode import RankPartition
from vqclip.process import progress
from vqclip.process.signals import STOP_SIGNALS, StopSignals
from vqclip.process.watchdog import STATUS, Watchdog


@pytest.fixture
def ended(monkeypatch):
    """Statuses with which the process would have ended; nothing else is changed but how long things take."""
    statuses = []
    monkeypatch.setattr("vqclip.process.watchdog.os._exit", statuses.append)
    monkeypatch.setattr("vqclip.process.watchdog._GRACE_S", 5.0)
    monkeypatch.setattr("vqclip.process.watchdog._CHECK_S", 0.05)
    dump_later = "vqclip.process.watchdog.faulthandler.dump_traceback_later"
    monkeypatch.setattr(dump_later, lambda seconds, **options: None)  # it would end pytest
    return statuses


def test_without_a_limit_there_is_no_thread_and_no_folder(tmp_path):
    before = threading.active_count()
    with Watchdog(tmp_path / "stacks", None, 0.01) as watchdog:
        watchdog.at(3, "in the next step")
        assert threading.active_count() == before
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_leaves_nothing(tmp_path, ended):
    before = threading.active_count()
    with Watchdog(tmp_path / "stacks", 1.0, 1.0) as watchdog:
        assert threading.active_count() == before + 1
        for done in range(12):
            watchdog.at(done, "in the next step")
            time.sleep(0.01)
            watchdog.beat()
    assert (ended, threading.active_count()) == ([], before)
    assert list(tmp_path.iterdir()) == []


def stand_here(ended):
    end = time.monotonic() + 30
    while not ended and time.monotonic() < end:
        time.sleep(0.01)


def test_a_run_that_stands_still_is_ended_and_says_where(tmp_path, ended, capfd):
    with Watchdog(tmp_path / "stacks", 0.2, 20.0) as watchdog:
        for done in range(7):
            watchdog.at(done, "waiting for the next batch")
        stand_here(ended)
    assert ended == [STATUS] == [3]
    error = capfd.readouterr().err
    assert "rank 0: no progress for 0.2 s (run.step_timeout_s): 6 steps done, waiting for the next batch" in error
    assert "the job hangs and ends with status 3:\n  rank 0: no progress" in error
    assert f"{tmp_path}/stacks/rank-*.txt" in error
    written = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert "in stand_here" in written
    assert "last collectives:" in written


def limits(watchdog, *positions):
    result = []
    for position in positions:
        watchdog.at(*position)
        result.append(watchdog._position.limit)
    return result


def test_the_first_steps_and_what_asks_for_patience_have_the_long_limit(tmp_path):
    watchdog = Watchdog(tmp_path, 3.0, 60.0)
    assert limits(watchdog, *((done, "") for done in range(10, 18))) == [60.0] * 5 + [3.0] * 3
    assert limits(watchdog, (18, ""), (18, "saving", True), (18, "")) == [3.0, 60.0, 60.0]
    assert limits(watchdog, (19, "")) == [3.0]  # where one rank saves, the others wait for it in the next step
    watchdog.expect_compilation()
    assert limits(watchdog, *((done, "") for done in range(20, 27))) == [60.0] * 4 + [3.0] * 3
    assert limits(Watchdog(tmp_path, 90.0, 60.0), *((done, "") for done in range(8))) == [60.0] * 8


def test_the_limit_counts_from_the_end_of_a_step(tmp_path):
    watchdog = Watchdog(tmp_path, 3.0, 60.0)

    def since(*position):
        time.sleep(0.002)
        watchdog.at(*position)
        return watchdog._position.since

    waiting, computing = since(8, "waiting"), since(8, "in the next")
    saving = since(9, "saving", True)
    evaluating, waiting_again = since(9, "evaluating", True), since(9, "waiting")
    assert waiting == computing < saving < evaluating < waiting_again
    watchdog.beat()
    assert watchdog._position.since > waiting_again
    assert watchdog._position.doing == "waiting"


def test_a_lost_rank_is_written_down_too(tmp_path, ended):
    with pytest.raises(DistributedError, match="gone"), Watchdog(tmp_path / "stacks", 20.0, 20.0):
        raise DistributedError("rank 1 is gone")
    written = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert "another rank is lost" in written
    assert "rank 1 is gone" in written
    assert "Current thread" in written.partition("stacks:\n")[2]
    assert ended == []


def history():
    before = len(dist.recent_collectives())
    dist.barrier()
    dist.gather_json({"rank": dist.rank()})
    try:
        with dist.named_errors("what fails"):
            raise RuntimeError
    except RuntimeError:
        pass
    recent = dist.recent_collectives()
    last = recent[-1]
    return before < 32 or len(recent) == 32, [each.name for each in recent[-4:]], recent[-3].shapes, last.finished


def test_a_rank_has_reported_when_its_report_is_whole(tmp_path, ended):
    """A rank that ends sooner makes the collectives of the others fail, and their stacks show that."""
    with Watchdog(tmp_path, 60.0, 60.0) as watchdog:
        watchdog._write("no progress")
        assert watchdog._read_positions()[0][1] == "no progress"
        report = (tmp_path / "rank-0.txt").read_text()
        (tmp_path / "rank-0.txt").write_text(report[: report.rindex("===")])
        assert watchdog._read_positions() == {}


def test_the_last_collectives_are_remembered(ranks):
    for bounded, names, shapes, finished in ranks(2, history):
        assert bounded
        assert names == ["reduce_", "all_gather", "all_gather", "what fails"]
        assert shapes == ((2,), (1,))
        assert finished is None


def stops_on_one_rank(where):
    def leave():
        if dist.rank() == 1:
            raise StopRequested

    with progress.report_to(leave):
        try:
            if where == "indexing":
                with dist.raise_on_all_ranks():
                    progress.heartbeat()
            else:
                with RankPartition(dist.rank(), dist.world_size()).raise_on_all_ranks():
                    progress.heartbeat()
        except StopRequested:
            return dist.gather_json("all are here")


@pytest.mark.parametrize("where", [pytest.param("indexing", marks=pytest.mark.slow), "evaluating"])
def test_work_that_one_rank_leaves_is_left_by_all(ranks, where):
    assert ranks(2, stops_on_one_rank, where) == [["all are here"] * 2] * 2


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
    def open_it():
        with StopSignals() as stop:
            handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
            stop.request("pruned")
            stop.request("too late")
            with pytest.raises(StopRequested):
                stop.raise_if_requested()
            return handlers, stop.reason

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(open_it).result() == (before, "pruned")


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
