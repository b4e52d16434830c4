"""A run folder at a URL: what is there counts, and the copy on this disk follows it."""

from __future__ import annotations

import shutil

import pytest

from tests.data.making import caption_shards
from tests.train.run_store.store import mirror_of, save, steps
from tests.training import all_equal, metrics, run_tree, weights
from vqclip import checkpoint
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.train import TrainConfig
from vqclip.train import run as train


def keep_none(step):
    return False


def upload(folder, *numbers, keep_last=9):
    """A job that saves some steps."""
    with mirror_of(folder) as mirror:
        mirror.open()
        for number in numbers:
            (folder / "metrics.jsonl").write_text(f"{number}\n")
            mirror.upload_checkpoint(save(folder, number), keep_last, keep_none)


def test_another_machine_finds_what_was_uploaded(tmp_path, store, caplog):
    upload(tmp_path / "a", 2, 4, 6, keep_last=2)
    assert not any("step-00000002" in name for name in store.names())
    with mirror_of(tmp_path / "b") as mirror:
        mirror.open()
        assert (tmp_path / "b" / "metrics.jsonl").read_text() == "6\n"
        assert [path.name for path in mirror.checkpoints()] == ["step-00000004", "step-00000006"]
        with caplog.at_level("INFO"):
            checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))
        assert " GB); all ranks wait, within run.timeout_s" in caplog.text
        assert steps(tmp_path / "b") == ["step-00000006"]  # the other one is fetched when it is needed
        # Retention counts those at the URL, not the few in the copy.
        mirror.upload_checkpoint(save(tmp_path / "b", 8), 2, keep_none)
        assert [path.name[-1] for path in mirror.checkpoints()] == ["6", "8"]


def test_a_checkpoint_is_there_with_its_manifest_alone(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.failing["put_file"] = [None, None, *[PermissionError("read only")] * 9]
    with pytest.raises(
        CheckpointError,
        match=r"step-00000004: the checkpoint could not be uploaded .*run\.remote\.tries=3.*it is in .*a/ch",
    ):
        upload(tmp_path / "a", 4)
    store.failing.clear()
    with mirror_of(tmp_path / "b") as mirror:
        mirror.open()
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002"]
    # The machine that has it uploads it, as it follows what is there.
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002", "step-00000004"]


def test_a_copy_that_others_have_overtaken_is_replaced(tmp_path, store):
    upload(tmp_path / "a", 2)
    upload(tmp_path / "b", 3)
    save(tmp_path / "a", 4, "never uploaded")
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002", "step-00000003"]
        assert not (tmp_path / "a" / "checkpoints").exists()


def test_files_of_a_killed_upload_and_damage_in_the_copy(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.pipe_file("/bucket/runs/tiny/checkpoints/step-00000004/model/weights", b"half", timeout=1)
    (tmp_path / "a" / "checkpoints" / "step-00000002" / "model" / "weights").write_text("damaged")
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        assert not any("step-00000004" in name for name in store.names())
        checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))


def test_newer_checkpoints_are_set_aside_at_the_url_too(tmp_path, store):
    upload(tmp_path / "a", 2, 4)
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        mirror.set_aside_newer(2)
        assert [path.name for path in mirror.checkpoints()] == ["step-00000002"]
    assert sum("set-aside-step-00000004" in name for name in store.names()) == 2


def test_a_run_that_was_removed_is_not_mixed_with_its_copy(tmp_path, store):
    upload(tmp_path / "a", 2)
    store.store.clear()
    with pytest.raises(ConfigError, match="has checkpoints of another run than s3://bucket/runs/tiny"):
        upload(tmp_path / "a", 4)
    shutil.rmtree(tmp_path / "a")
    upload(tmp_path / "a", 4)


def test_names_that_lead_elsewhere_are_not_fetched(tmp_path, store):
    upload(tmp_path / "a", 2)
    for name in ("../x", "checkpoints/step-00000002/../../../y"):
        store.store[f"/bucket/runs/tiny/{name}"] = store.store["/bucket/runs/tiny/run.json"]
    with mirror_of(tmp_path / "b") as mirror:
        mirror.open()
        checkpoint.verify(mirror.fetch(mirror.checkpoints()[-1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_removed_notes_are_removed_at_the_url(tmp_path, store):
    upload(tmp_path / "a", 2)
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        (tmp_path / "a" / "stopped.json").write_text("{}")
        mirror.upload_files()
    assert "stopped.json" in store.names()
    (tmp_path / "a" / "stopped.json").unlink()
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        mirror.upload_files()
    assert "stopped.json" not in store.names()


def test_failures_of_the_store_are_tried_again_and_then_named(tmp_path, store):
    store.failing["pipe_file"] = [OSError("503 Slow Down")] * 2
    upload(tmp_path / "a", 2)
    for error, told in (
        (PermissionError("Access Denied"), "cannot be listed: PermissionError: Access Denied; this is not tried again"),
        (OSError("503"), "cannot be listed: OSError: 503. Tries: 3 of"),
    ):
        store.failing["all"] = [error] * 9
        with pytest.raises(StorageError, match=told):
            upload(tmp_path / "b", 4)
        del store.failing["all"]


@pytest.mark.parametrize(
    "folder", ["http://host/runs", "hf://datasets/x", "s3://bucket/runs?x=y", "ftp://host/x", "s3://"]
)
def test_folders_that_cannot_be_written_to(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"run.folder: "):
        train(run_tree(folder, tmp_path))


def test_a_run_continues_on_another_machine(tmp_path, store, monkeypatch):
    """From a damaged checkpoint to the one before it, and again to the same bits."""
    tree = run_tree("s3://bucket/runs", caption_shards(tmp_path / "shards", counts=(17, 13)), train__steps=4)
    tree["train"]["checkpoint_every"] = 2
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
