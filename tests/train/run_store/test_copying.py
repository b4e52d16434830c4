"""``vqclip copy-run``, and what other commands answer to a URL."""

from __future__ import annotations

import pytest

from tests.train.run_store.store import URL, mirror_of, save, steps
from vqclip.cli.main import main
from vqclip.errors import StorageError


@pytest.fixture
def run(tmp_path, store):
    with mirror_of(tmp_path / "a") as mirror:
        mirror.open()
        for step in (2, 4):
            (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
            mirror.upload_checkpoint(save(tmp_path / "a", step), 9, lambda step: False)
    return tmp_path / "copy"


def test_the_newest_intact_checkpoint_is_copied(run, store, capsys):
    assert main(["copy-run", URL, str(run)]) == 0
    assert capsys.readouterr().out == f"{run}\n"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "metrics.jsonl", "run.json"]
    assert steps(run) == ["step-00000004"]
    assert main(["copy-run", URL, str(run)]) == 2
    assert f"{run}: exists; expected a new folder" in capsys.readouterr().err
    store.pipe_file("/bucket/runs/tiny/checkpoints/step-00000004/model/weights", b"damaged", timeout=1)
    assert main(["copy-run", URL, str(run) + "2", "--all"]) == 0
    assert main(["copy-run", URL, str(run) + "3"]) == 0
    assert "step-00000002" in steps(run.with_name("copy3"))


def test_mistakes(run, store, capsys):
    for arguments, told in (
        (
            ["copy-run", f"{URL}x", str(run)],
            f"{URL}x: no run there: nothing is below this name. Are the names of bucket",
        ),
        (["copy-run", URL.rpartition("/")[0], str(run)], "no run there: there are files, but no run.json"),
        (["copy-run", "runs/base", str(run)], "expected a URL of a run"),
        (
            ["copy-run", "http://host/runs/base", str(run)],
            "got http://host/runs/base; expected a local folder, or a URL",
        ),
        (
            ["evaluate", "s3://me:secret@b/runs/x"],
            "s3://b/runs/x: models are not read from URLs; `vqclip copy-run URL F",
        ),
    ):
        assert main(arguments) in (1, 2)
        error = capsys.readouterr().err
        assert told in error
        assert "secret" not in error
    with pytest.raises(SystemExit):
        main(["report", "s3://me:secret@b/runs/x"])
    error = capsys.readouterr().err
    assert (
        "got 's3://b/runs/x', expected a path on this machine; a run at a URL is copied to one by `vqclip copy-run"
        in error
    )


def test_objects_that_are_folders_too_are_named(run, store, tmp_path, capsys):
    """An object store may have `a` and `a/b`, a disk may not."""
    store.pipe_file("/bucket/runs/tiny/logs", b"", timeout=1)
    store.store["/bucket/runs/tiny/logs/deep/x"] = store.store["/bucket/runs/tiny/logs"]
    assert main(["copy-run", URL, str(run)]) == 2
    told = f"{URL}/logs: is an object, and a folder of {URL}/logs/deep/x too, which no disk can hold; remove or rename"
    assert told in capsys.readouterr().err
    assert not run.exists()
    with mirror_of(tmp_path / "other") as mirror, pytest.raises(StorageError, match="is an object, and a folder of"):
        mirror.open()


def test_a_folder_that_cannot_be_written_is_named(run, store, capsys):
    assert main(["copy-run", URL, "/proc/x"]) == 2
    assert "/proc/x: cannot be written (No such file or directory); expected a new folder" in capsys.readouterr().err
