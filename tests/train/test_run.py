"""`vqclip.train.run` from Python: its result, callbacks that stop it, threads, and the state that it leaves behind."""

import faulthandler
import gc
import json
import logging
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.commands import command
from tests.training import all_equal, metrics, retrieval, run_tree, weights
from vqclip import dist, load_tokenizer
from vqclip.errors import ConfigError
from vqclip.process.signals import STOP_SIGNALS
from vqclip.train import Callback, TrainConfig
from vqclip.train import run as train

main = command("train")


class Stop(Callback):
    """Asks for a stop after a step, on one rank."""

    def __init__(self, step, checkpoint=True, hook="on_step_end"):
        self.step, self.checkpoint = step, checkpoint
        setattr(self, hook, self.ask)

    def ask(self, training):
        number = training.done if training.done else training.batch.step
        if number == self.step and dist.rank() == dist.world_size() - 1:
            training.request_stop("not worth it", checkpoint=self.checkpoint)


def test_a_file_with_overrides_data_and_the_command_give_the_same_bits(tmp_path, shards, capsys):
    changes = {"optim__warmup_steps": 1, "evaluation": retrieval(shards)}
    tree = run_tree(tmp_path / "data", shards, train__steps=3, **changes)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_tree(tmp_path / "command", shards, train__steps=9, **changes)))
    assert main(["--config", str(file), "train.steps=3"]) == 0
    first = train(tree)
    second = train(file, overrides=["train.steps=3", f"run.folder={tmp_path / 'file'}"])
    assert all(all_equal(weights(tmp_path / "command", 3), weights(tmp_path / name, 3)) for name in ("data", "file"))
    assert str(first).splitlines()[1:4] == capsys.readouterr().out.splitlines()[1:4]

    assert (first.finished, first.stopped, first.step, first.folder) == (True, None, 3, tmp_path / "data" / "tiny")
    assert first.results[0].figures == second.results[0].figures
    assert load_tokenizer(str(first.tokenizer), "image").num_tokens
    (last,) = [line for line in metrics(tmp_path / "data") if line["step"] == 3 and "loss/total" in line]
    assert first.metrics["loss/total"] == last["loss/total"]
    assert first.metrics["eval/pairs/codes_only/i2t_r1"] == first.results[0].figures["codes_only"]["i2t_r1"]
    assert first.config == TrainConfig.model_validate(tree)


@pytest.mark.parametrize(("checkpoint", "hook"), [(True, "on_step_end"), (False, "on_step_start")])
def test_a_callback_stops_a_run(tmp_path, shards, checkpoint, hook):
    tree = run_tree(tmp_path, shards, train__steps=4)
    done = 2 if hook == "on_step_end" else 3
    result = train(tree, [Stop(2, checkpoint, hook)])
    assert (result.finished, result.step, result.stopped) == (False, done, "not worth it")
    assert (result.summary, result.tokenizer, result.results) == (None, None, [])
    assert result.metrics["loss/total"] > 0
    assert f"stopped after step {done} of 4 (not worth it)" in str(result)
    saved = [path.name for path in (tmp_path / "tiny" / "checkpoints").glob("step-*")]
    assert saved == ([f"step-{done:08d}"] if checkpoint else [])
    facts = json.loads((tmp_path / "tiny" / "stopped.json").read_text())
    assert (facts["signal"], facts["reason"], facts["step"]) == (None, "not worth it", done if checkpoint else 0)
    if checkpoint:
        assert train(tree).finished
        train(run_tree(tmp_path / "whole", shards, train__steps=4))
        assert all_equal(weights(tmp_path, 4), weights(tmp_path / "whole", 4))


def test_a_stop_after_the_last_step_leaves_out_the_evaluation(tmp_path, shards):
    tree = run_tree(tmp_path, shards, train__steps=2, optim__warmup_steps=0, evaluation=retrieval(shards))
    assert train(tree, [Stop(2)]).stopped == "not worth it"
    assert not any("eval/" in name for line in metrics(tmp_path) for name in line)
    assert train(tree).results


def test_one_rank_stops_all(tmp_path, shards, ranks):
    """After the step that follows, in the group that `ranks` has made, which stays."""
    for checkpoint in (False, True):
        tree = run_tree(tmp_path, shards, train__steps=5)
        one, other = ranks(2, train, tree, [Stop(3, checkpoint)])
        assert (one.step, one.stopped) == (other.step, other.stopped) == (4, "not worth it")
        assert one.metrics["loss/total"] == other.metrics["loss/total"]
        saved = [path.name for path in (tmp_path / "tiny" / "checkpoints").glob("step-*")]
        assert saved == ["step-00000004"] * checkpoint


def state():
    gc.collect()  # a traceback keeps what its frames have open
    loggers = [logging.getLogger(name) for name in (None, "vqclip", "vqclip.output", "torch")]
    return {
        "random": torch.get_rng_state().tolist(),
        "threads": {thread for thread in threading.enumerate() if thread.is_alive()},
        "handlers": [signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)],
        "logging": [(each.level, each.propagate, list(each.handlers), list(each.filters)) for each in loggers],
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
        "folder": os.getcwd(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def changes(before):
    after = state()
    return {name: after[name] for name in before if after[name] != before[name]}


class Fail(Callback):
    def on_step_end(self, training):
        raise ZeroDivisionError("mine")


def test_nothing_is_left_behind(tmp_path, shards, monkeypatch):
    monkeypatch.setattr("vqclip.train.main.keep_freed_memory", lambda: pytest.fail("it cannot be reset"))
    train(run_tree(tmp_path / "warm", shards, train__steps=1, optim__warmup_steps=0))  # imports of tensorboard
    torch.manual_seed(123)
    before = state()
    train(run_tree(tmp_path / "finished", shards, train__steps=2, optim__warmup_steps=0))
    train(run_tree(tmp_path / "stopped", shards, train__steps=4), [Stop(1)])
    assert changes(before) == {}
    with pytest.raises(ZeroDivisionError):
        train(run_tree(tmp_path / "failed", shards, train__steps=4), [Fail()])
    del before["files"]  # pytest keeps the traceback, whose frames hold open files
    assert changes(before) == {}


def test_an_interrupt_saves_and_returns(tmp_path, shards, interruptible, capfd):
    class Interrupt(Callback):
        def on_step_end(self, training):
            if training.done == 2:
                os.kill(os.getpid(), signal.SIGINT)  # as a notebook does

    result = train(run_tree(tmp_path, shards, train__steps=9, optim__warmup_steps=0), [Interrupt()])
    assert (result.step, result.stopped) == (2, "SIGINT")
    assert (tmp_path / "tiny" / "checkpoints" / "step-00000002").exists()
    out, error = capfd.readouterr()
    assert "SIGINT: stopping; the run can be resumed" in error
    assert out == ""
    assert str(result).startswith("stopped after step 2 of 9 (SIGINT); the learning rate is still ")


def test_a_second_run_at_once_is_refused(tmp_path, shards):
    class Again(Callback):
        def on_train_end(self, training):
            for where in (train, lambda tree: in_a_thread(train, tree)):
                with pytest.raises(ConfigError, match="other/tiny cannot train while this process trains another run"):
                    where(run_tree(tmp_path / "other", shards, train__steps=1, optim__warmup_steps=0))

    tree = run_tree(tmp_path, shards, train__steps=1, optim__warmup_steps=0)
    assert train(tree, [Again()]).finished
    assert not (tmp_path / "other").exists()


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: torch.no_grad(), "torch.is_grad_enabled.*: got False"),
        (lambda: torch.autocast("cpu"), "is_autocast_enabled.'cpu'.*: got True, expected False"),
        (lambda: torch.device("meta"), "get_default_device.*: got meta"),
    ],
)
def test_other_defaults_of_torch_are_refused(tmp_path, shards, change, message):
    with pytest.raises(ConfigError, match=message), change():
        train(run_tree(tmp_path, shards))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("none.yaml", "none.yaml: no such configuration file"),
        ({"run": {"nme": "x"}}, 'run.nme: unknown key; did you mean "name"'),
        ({"run": {"folder": object()}}, "not plain data .*object"),
        (3, "got int; expected a file, a dict or a configuration"),
    ],
)
def test_mistakes_are_errors_of_ours(config, message):
    with pytest.raises(ConfigError, match=message):
        train(config)


def test_wrong_callbacks_and_overrides_are_refused(tmp_path, shards):
    tree = run_tree(tmp_path, shards)
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: got <class .*expected an instance of vqclip.train.Callb"):
        train(tree, [Callback])
    with pytest.raises(ConfigError, match="got the string 'optim.lr=1'; expected a list"):
        train(tree, overrides="optim.lr=1")


def test_a_run_that_hangs_warns_and_goes_on(tmp_path, shards, monkeypatch, caplog):
    """Also with a debugger's long stop in a callback."""
    monkeypatch.setattr("vqclip.process.watchdog._CHECK_S", 0.02)
    monkeypatch.setattr("vqclip.process.watchdog._FIRST_STEPS", 0)

    class Wait(Callback):
        def on_step_start(self, training):
            end = time.monotonic() + 20
            while training.done == 1 and "no progress" not in caplog.text and time.monotonic() < end:
                time.sleep(0.02)

    tree = run_tree(tmp_path, shards, train__steps=2, optim__warmup_steps=0, run__step_timeout_s=0.3)
    ends = []
    with monkeypatch.context() as patch:  # the last two are those of the whole process, such as of pytest
        patch.setattr("vqclip.process.watchdog.os._exit", ends.append)
        patch.setattr(faulthandler, "dump_traceback_later", lambda *args, **options: ends.append(args))
        patch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: ends.append("cancel"))
        assert train(tree, [Wait()]).finished
    assert ends == []
    assert "no progress for 0.3 s (run.step_timeout_s): 1 steps done" in caplog.text
    assert "the process continues: interrupt the run to end it" in caplog.text
    assert "in on_step_start" in (tmp_path / "tiny" / "stacks" / "rank-0.txt").read_text()


def test_the_log_file_does_not_depend_on_the_level_of_the_program(tmp_path, shards, caplog):
    caplog.set_level(logging.WARNING, "vqclip")
    train(run_tree(tmp_path, shards, train__steps=1, optim__warmup_steps=0))
    log = (tmp_path / "tiny" / "train.log").read_text()
    assert "data: " in log
    assert len(re.findall(r"^[\d-]{10} [\d:]{8} data: ", log, re.MULTILINE)) == 1
    assert not [record for record in caplog.records if record.levelno < logging.WARNING]


def losses(folder):
    return [line["loss/total"] for line in metrics(folder) if "loss/total" in line]


def test_a_sweep_runs_in_one_process_and_in_any_thread(tmp_path, shards):
    """The second run has the bits of the first; a thread has no signal handlers, and needs none."""
    changes = {"train__steps": 4, "data__workers": 1, "evaluation": retrieval(shards)}
    first, second, third = (run_tree(tmp_path / name, shards, **changes) for name in ("first", "second", "thread"))
    results = train(first), train(second), in_a_thread(train, third)
    assert [each.step for each in results] == [4, 4, 4]
    assert all(each.results[0].figures == results[0].results[0].figures for each in results)
    assert losses(tmp_path / "first") == losses(tmp_path / "second") == losses(tmp_path / "thread")
