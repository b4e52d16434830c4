"""A run folder at a URL: what is there counts, and the copy on this disk follows it."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.training import StopAfter, all_equal, metrics, retrieval, run_tree, weights
from vqclip import checkpoint
from vqclip.cli.main import main
from vqclip.data.remote import files as remote_files
from vqclip.data.remote.retry import TransferConfig
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.train import Callback, TrainConfig
from vqclip.train import run as train
from vqclip.train.run_store import RunMirror

URL = "s3://bucket/runs/tiny"


class Store(MemoryFileSystem):
    """Fails by ``failing``: name of a method -> errors of its next calls, None for a call that succeeds."""

    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    failing: dict[str, list[Exception | None]]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("find", "cat_file", "pipe_file", "put_file", "get_file", "rm_file", "cp_file"):
            return found

        def call(*args: Any, timeout: float, **options: Any) -> Any:
            assert timeout > 0
            errors = self.failing.get(name, self.failing.get("all"))
            if errors and (error := errors.pop(0)):
                raise error
            result = found(*args, **options)
            # A bucket's names have no slash at the beginning.
            return {each.lstrip("/"): info for each, info in result.items()} if name == "find" else result

        return call

    def names(self) -> list[str]:
        return sorted(name.removeprefix("/bucket/runs/tiny/") for name in self.store)


@contextlib.contextmanager
def opened(folder: Path, done: int = 1000) -> Iterator[RunMirror]:
    """A job with its copy in ``folder``, which continues after ``done`` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    with RunMirror(URL, folder, TransferConfig(tries=3)) as mirror:
        mirror.open()
        mirror.claim(done)
        yield mirror


def save(folder: Path, step: int, content: str = "weights") -> Path:
    def fill(aside: Path) -> None:
        (aside / "model" / "weights").write_text(f"{content} {step}")

    return checkpoint.save(folder / "checkpoints", step, fill, {}, 99)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store at every URL, and no waiting between tries."""
    files = Store(skip_instance_cache=True)
    files.failing = {}
    files.store.clear()
    monkeypatch.setattr(remote_files, "object_store", lambda url, timeout_s: files)
    monkeypatch.setattr("vqclip.data.remote.retry._sleep", lambda seconds: None)
    yield files
    files.store.clear()


def keep_none(step):
    return False


def upload(folder, *numbers, keep_last=9):
    with opened(folder) as mirror:
        for number in numbers:
            (folder / "config.yaml").write_text("one: run\n")
            (folder / "metrics.jsonl").write_text(f"{number}\n")
            mirror.upload_checkpoint(save(folder, number), keep_last, keep_none)


def test_another_machine_finds_what_was_uploaded(tmp_path, store, caplog):
    upload(tmp_path / "a", 2, 4, 6, keep_last=2)
    assert not any("step-00000002" in name for name in store.names())
    with opened(tmp_path / "b") as mirror:
        assert (tmp_path / "b" / "metrics.jsonl").read_text() == "6\n"
        assert [path.name for path in mirror.checkpoints()] == ["step-00000004", "step-00000006"]
        with caplog.at_level("INFO"):
            checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))
        assert "bytes); all ranks wait, within run.timeout_s" in caplog.text
        assert steps(tmp_path / "b") == ["step-00000006"]  # the other one is fetched when it is needed
        # Retention counts those at the URL, not the few in the copy.
        mirror.upload_checkpoint(save(tmp_path / "b", 8), 2, keep_none)
        assert [path.name[-1] for path in mirror.checkpoints()] == ["6", "8"]


def test_files_that_vanish_while_they_are_listed_are_left_out(tmp_path, store, monkeypatch):
    upload(tmp_path / "a", 2)
    walk = os.walk

    def removing(folder):
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        (folder / "gone").unlink(missing_ok=True)
        return walk(folder)

    with opened(tmp_path / "a") as mirror:
        (tmp_path / "a" / "wandb" / "run").mkdir(parents=True)
        (tmp_path / "a" / "gone").write_text("x")
        monkeypatch.setattr(os, "walk", lambda folder: (each for each in (next(walk(folder)), *removing(folder))))
        mirror.upload_files()
    assert "gone" not in store.names()


def test_a_checkpoint_is_there_with_its_manifest_alone(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.failing["put_file"] = [None, None, *[PermissionError("read only")] * 9]
    told = r"step-00000004: the checkpoint could not be uploaded .*run\.remote\.tries=3.*it is in .*a/ch"
    with pytest.raises(CheckpointError, match=told):
        upload(tmp_path / "a", 4)
    store.failing.clear()
    with opened(tmp_path / "b") as mirror:
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002"]


def test_a_copy_that_others_have_overtaken_is_replaced(tmp_path, store):
    upload(tmp_path / "a", 2)
    upload(tmp_path / "b", 3)
    save(tmp_path / "a", 4, "never uploaded")
    (tmp_path / "a" / "left.txt").write_text("of the former job")
    (tmp_path / "a" / "stacks").mkdir()
    (tmp_path / "a" / "stacks" / "rank-0.txt").write_text("of a hang, after which nothing was uploaded")
    with opened(tmp_path / "a") as mirror:
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002", "step-00000003"]
        # Step 2 has the same bytes, so it need not be fetched again.
        assert steps(tmp_path / "a") == ["set-aside-step-00000004", "step-00000002"]
        assert (tmp_path / "a" / "metrics.jsonl").read_text() == "3\n"
        assert not (tmp_path / "a" / "left.txt").exists()
        assert (tmp_path / "a" / "stacks" / "rank-0.txt").exists()


def test_files_of_a_killed_upload_and_damage_in_the_copy(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.pipe_file("/bucket/runs/tiny/checkpoints/step-00000004/model/weights", b"half", timeout=1)
    aside = "checkpoints/set-aside-step-00000001"
    for name in ("manifest.json", "weights"):  # somebody wants to look into it
        store.pipe_file(f"/bucket/runs/tiny/{aside}/{name}", b"x", timeout=1)
    (tmp_path / "a" / "checkpoints" / "step-00000002" / "model" / "weights").write_text("damaged")
    with opened(tmp_path / "a") as mirror:
        checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))
        mirror.upload_checkpoint(save(tmp_path / "a", 3), 9, keep_none)
        assert not any("step-00000004" in name for name in store.names())
        assert f"{aside}/weights" in store.names()


def test_a_run_that_was_removed_is_not_mixed_with_its_copy(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.store.clear()
    with pytest.raises(ConfigError, match="has checkpoints of the run, and s3://bucket/runs/tiny has none. Remove"):
        upload(tmp_path / "a", 4)
    shutil.rmtree(tmp_path / "a")
    upload(tmp_path / "a", 4)


def test_names_that_lead_elsewhere_are_not_fetched(tmp_path, store):
    upload(tmp_path / "a", 2)
    for name in ("../x", "checkpoints/step-00000002/../../../y"):
        store.store[f"/bucket/runs/tiny/{name}"] = store.store["/bucket/runs/tiny/config.yaml"]
    with opened(tmp_path / "b") as mirror:
        checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_of_two_jobs_the_one_that_started_last_continues(tmp_path, store):
    with opened(tmp_path / "a") as first:
        first.upload_checkpoint(save(tmp_path / "a", 2), 9, keep_none)
        first.upload_checkpoint(save(tmp_path / "a", 3), 9, keep_none)  # after the other job has looked for the newest
        with opened(tmp_path / "b", 2) as second:
            assert [path.name for path in second.checkpoints()] == ["step-00000002"]
            before = store.names()
            with pytest.raises(CheckpointError, match="another job .* continues the run at .*; this one"):
                first.upload_checkpoint(save(tmp_path / "a", 4), 9, keep_none)
            with pytest.raises(CheckpointError, match="another job"):
                first.upload_files()
            assert store.names() == before
            second.upload_checkpoint(save(tmp_path / "b", 4, "other weights"), 9, keep_none)


def test_newer_checkpoints_and_files_that_are_gone_are_removed_at_the_url(tmp_path, store):
    upload(tmp_path / "a", 2, 4)
    with opened(tmp_path / "a") as mirror:
        for note in ("stopped.json", "best.json"):
            (tmp_path / "a" / note).write_text("{}")
        mirror.upload_files()
    with opened(tmp_path / "b", 2) as mirror:
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002"]
        (tmp_path / "b" / "stopped.json").unlink()
        mirror.upload_files()
    assert not any("step-00000004" in name or "stopped" in name for name in store.names())
    assert "best.json" in store.names()


def test_failures_of_the_store_are_tried_again_and_then_named(tmp_path, store):
    store.failing["put_file"] = [OSError("503 Slow Down")] * 2
    upload(tmp_path / "a", 2)
    for error, told in (
        (PermissionError("Access Denied"), "cannot be listed: PermissionError: Access Denied; this is not tried again"),
        (OSError("503"), "cannot be listed: OSError: 503. Tries: 3 of"),
    ):
        store.failing["all"] = [error] * 9
        with pytest.raises(StorageError, match=told):
            upload(tmp_path / "b", 4)
        del store.failing["all"]


@pytest.mark.parametrize("folder", ["http://host/x", "hf://datasets/x", "s3://bucket/x?x=y", "ftp://host/x", "s3://"])
def test_folders_that_cannot_be_written_to(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"run.folder: "):
        train(run_tree(folder, tmp_path))


def test_a_run_continues_on_another_machine(tmp_path, shards, store, monkeypatch):
    """From a damaged checkpoint to the one before it, and again to the same bits."""
    tree = run_tree("s3://bucket/runs", shards, train__steps=4, train__checkpoint_every=2)
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    first = TrainConfig.model_validate(tree).run.path
    assert train(tree).finished
    name = "/bucket/runs/tiny/checkpoints/step-00000004/model/model.safetensors"
    content = bytearray(store.cat_file(name, timeout=1))
    content[-1] ^= 1
    store.pipe_file(name, bytes(content), timeout=1)

    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "b"))
    copy = TrainConfig.model_validate(tree).run.path
    assert train(tree).finished
    log = (copy / "train.log").read_text()
    assert "step-00000004/model/model.safetensors: SHA-256" in log
    assert "resumed from step 2" in log
    assert all_equal(weights(copy.parent, 4), weights(first.parent, 4))
    lines = [[each["loss/total"] for each in metrics(run.parent) if "loss/total" in each] for run in (first, copy)]
    assert lines[0] == lines[1]
    assert {"summary.json", "report.html", "tokenizer/model.safetensors", "train.log"} <= set(store.names())


class Ask(Callback):
    """Remember what is at the URL when the training begins."""

    def __init__(self, store):
        self.store = store

    def on_train_start(self, training):
        self.names = self.store.names()


class Fail(Callback):
    def on_step_end(self, training):
        if training.done == 3:
            raise ValueError("mine")


@pytest.fixture
def tree_at(shards):
    best = {"train__keep_best": "eval/pairs/codes_only/i2t_r1", "train__evaluate_every": 2}
    best |= {"evaluation": retrieval(shards)}

    def make(place, **changes):
        return run_tree(place, shards, **best | {"train__steps": 8, "train__checkpoint_every": 2} | changes)

    return make


@pytest.mark.slow
def test_a_stopped_run_continues_elsewhere_with_its_best_step(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    slow = {"optim__lr": 1e-9}  # so that the first evaluation stays the best
    tree = tree_at("s3://bucket/runs", **slow)
    assert train(tree, [StopAfter(5)]).stopped == "enough"
    notes = json.loads(store.cat_file("/bucket/runs/tiny/stopped.json", timeout=1))
    assert (notes["step"], notes["checkpoint"]) == (5, "checkpoints/step-00000005")

    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "b"))
    copy = TrainConfig.model_validate(tree).run.path
    ask = Ask(store)
    result = train(tree, [ask])
    assert "stopped.json" not in ask.names
    assert "stored at   s3://bucket/runs/tiny" in str(result)
    whole = train(tree_at(tmp_path / "whole", **slow))
    assert whole.summary.best["step"] == 2
    assert result.summary.best == whole.summary.best
    assert all_equal(weights(copy.parent, 8), weights(tmp_path / "whole", 8))
    best = f"checkpoints/step-{result.summary.best['step']:08d}/manifest.json"
    assert (copy / best).is_file()
    assert best in store.names()


@pytest.mark.slow
def test_a_run_folder_that_was_copied_to_a_url(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    run = train(tree_at(tmp_path / "runs")).folder
    for path in run.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/bucket/runs/tiny/{path.relative_to(run).as_posix()}", path.read_bytes(), timeout=1)
    tree = tree_at("s3://bucket/runs", train__steps=10, run__resume_allow=["train.steps"])
    assert train(tree).step == 10
    assert "resumed from step 8" in store.cat_file("/bucket/runs/tiny/train.log", timeout=1).decode()
    with pytest.raises(ConfigError, match="got 'never', but s3://bucket/runs/tiny/checkpoints contains checkpoints"):
        train(tree_at("s3://bucket/runs", run__resume="never"))


@pytest.mark.slow
def test_what_an_error_leaves_is_uploaded(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    with pytest.raises(ValueError, match="mine"):
        train(tree_at("s3://bucket/runs"), [Fail()])
    assert "Fail failed in on_step_end" in store.cat_file("/bucket/runs/tiny/train.log", timeout=1).decode()


@pytest.fixture
def run(tmp_path, store):
    upload(tmp_path / "a", 2, 4)
    return tmp_path / "copy"


def test_the_newest_intact_checkpoint_is_copied(run, store, capsys, refused):
    assert main(["copy-run", URL, str(run)]) == 0
    assert capsys.readouterr().out == f"{run}\n"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert steps(run) == ["step-00000004"]
    assert f"{run}: exists; expected a new folder" in refused(main(["copy-run", URL, str(run)]))
    store.pipe_file("/bucket/runs/tiny/checkpoints/step-00000004/model/weights", b"damaged", timeout=1)
    assert main(["copy-run", URL, str(run) + "2"]) == 0
    assert "step-00000002" in steps(run.with_name("copy2"))


def test_mistakes(run, store, capsys):
    for arguments, told in (
        (["copy-run", f"{URL}x", str(run)], f"{URL}x: no run there: no config.yaml among 0 files. Are the names"),
        (["copy-run", URL.rpartition("/")[0], str(run)], "no run there: no config.yaml among "),
        (["copy-run", "runs/base", str(run)], "expected a URL of a run"),
        (["copy-run", URL, "/proc/x"], "/proc/x: cannot be written (No such file or directory); expected a new folder"),
        (["copy-run", "http://host/x", str(run)], "got http://host/x; expected a local folder, or a URL"),
        (["evaluate", "s3://me:secret@b/x"], "s3://b/x: models are not read from URLs; `vqclip copy-run URL F"),
        (["report", "s3://me:secret@b/x"], "'s3://b/x' (str); expected a path on this machine; a run at a URL"),
    ):
        assert main(arguments) in (1, 2)
        error = capsys.readouterr().err
        assert told in error
        assert "secret" not in error


@pytest.mark.skipif(fsspec.__version__ < "2026.9", reason="its memory:// has no object that is a folder too")
def test_objects_that_are_folders_too_are_named(run, store, tmp_path, refused):
    """An object store may have `a` and `a/b`, a disk may not."""
    store.pipe_file("/bucket/runs/tiny/logs", b"", timeout=1)
    store.store["/bucket/runs/tiny/logs/deep/x"] = store.store["/bucket/runs/tiny/logs"]
    assert f"{URL}/logs/deep/x: cannot be fetched: FileExistsError" in refused(main(["copy-run", URL, str(run)]))
    assert not run.exists()
    with pytest.raises(StorageError, match="logs/deep/x: cannot be fetched: FileEx"), opened(tmp_path / "other"):
        pass
