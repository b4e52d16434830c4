import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command
from tests.data.making import class_folder
from tests.on_ray import kill_worker, small_ray, wait_for, workers
from tests.tokenize_dataset.making import BATCH, hashes, run, shards, tokenizer_folder
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.errors import StorageError
from vqclip.tokenize_dataset import job

main = command("tokenize")

ray = pytest.fixture(scope="module")(small_ray)
COUNTS = (11, 8, 3, 0, 9, 12, 7, 10, 6, 5)


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    return tokenizer_folder(tmp_path / "tokenizer")


def arguments(tokenizer: str, data: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--batch-size", str(BATCH), "--device", "cpu", "--engine", "ray", "--ray-actors", "2"]
    return ["--tokenizer", tokenizer, "--data", str(data), "--out", str(out), *fixed, *more]


@contextlib.contextmanager
def killing_a_worker(out: Path) -> Iterator[list[int]]:
    """Kill one of the workers by SIGKILL as soon as a shard is finished, and so while others are in work."""
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: list(out.glob("records/*.json")))
        killed.append(kill_worker() or 0)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    thread.join()


@pytest.mark.slow
def test_the_bytes_of_the_local_engine_with_a_worker_killed(tmp_path, tokenizer, ray, capfd):
    data, out = shards(tmp_path / "in", COUNTS, damaged=(5, 13)), tmp_path / "ray"
    run(tokenizer, data, tmp_path / "local", tolerance=0.1)
    given = arguments(tokenizer, data, out, "--tolerance", "0.1")
    with killing_a_worker(out) as killed:
        assert main(given) == 0
    assert killed[0] > 0
    assert hashes(out) == hashes(tmp_path / "local")
    shown = capfd.readouterr()
    assert f"{out}: {sum(COUNTS) - 2} samples in 10 shards" in shown.out
    assert "2 left out (2 damaged image" in shown.out
    assert "Traceback" not in shown.err + shown.out
    (out / "00002.parquet").write_bytes(b"damaged")
    assert main(given) == 0
    assert "shards: 1 written, 9 already finished" in capfd.readouterr().out
    assert hashes(out) == hashes(tmp_path / "local")


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process_and_its_work_is_found(tmp_path, tokenizer, ray, capfd):
    data, out = shards(tmp_path / "in", COUNTS * 3), tmp_path / "ray"
    given = arguments(tokenizer, data, out)
    for number, expected in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        there = len(list(out.glob("records/*.json")))
        driver = subprocess.Popen(
            [sys.executable, "-m", "vqclip", "tokenize", *given], stderr=subprocess.PIPE, text=True, errors="replace"
        )
        wait_for(lambda before=there: len(list(out.glob("records/*.json"))) > before)
        mine = workers()
        assert mine
        os.kill(driver.pid, number)
        _, shown = driver.communicate(timeout=60)
        assert driver.returncode == expected
        if number == signal.SIGINT:
            assert shown.endswith("vqclip tokenize: interrupted; run the same command to continue\n")
            assert "Traceback" not in shown
        wait_for(lambda those=mine: not any(Path(f"/proc/{each}").exists() for each in those))
    assert not (out / "manifest.json").exists()
    there = len(list(out.glob("records/*.json")))
    assert main(given) == 0
    assert f"{there} already finished" in capfd.readouterr().out
    run(tokenizer, data, tmp_path / "local")
    assert hashes(out) == hashes(tmp_path / "local")


@pytest.mark.slow
def test_class_folders_and_data_workers(tmp_path, tokenizer, ray, monkeypatch):
    folder = Path(class_folder(tmp_path / "in", 6))
    run(tokenizer, ClassShardsConfig(path=str(folder)), tmp_path / "local")
    monkeypatch.chdir(tmp_path)  # workers have another working folder
    given = arguments(os.path.relpath(tokenizer), Path("in"), Path("ray"), "--workers", "1", "--ray-cpus", "1")
    assert main(given) == 0
    assert hashes(tmp_path / "ray") == hashes(tmp_path / "local")


@pytest.mark.slow
def test_mistakes_end_in_one_line(tmp_path: Path, tokenizer: str, ray: None, capfd: pytest.CaptureFixture[str]) -> None:
    data, out = shards(tmp_path / "in", COUNTS, damaged=(2, 12, 13)), tmp_path / "out"

    def problem(*given: str, status: int = 1, into: Path = out) -> str:
        assert main(arguments(tokenizer, data, into, *given)) == status
        shown = capfd.readouterr().err
        assert "Traceback" not in shown
        return shown[shown.index("vqclip tokenize:") :]

    shown = problem("--tolerance", "0.002")
    assert "3 samples cannot be used; --tolerance allows 2 of these data" in shown
    assert "00000.tar: sample 000000002" in shown
    assert not (out / "manifest.json").exists()
    assert main(arguments(tokenizer, data, out, "--tolerance", "0.1")) == 0
    assert "batch_size: 4 there, 5 now" in problem("--batch-size", "5", status=2)
    (data / "00004.tar").write_bytes((data / "00004.tar").read_bytes()[:3000])
    assert "00004.tar: " in problem(into=tmp_path / "truncated")


@pytest.mark.slow
def test_a_shard_that_changes_after_it_is_indexed_is_refused(tmp_path, tokenizer, ray, monkeypatch):
    data = shards(tmp_path / "in", COUNTS)

    original = job._open_source

    def open_and_change(options: Any) -> Any:
        found = original(options)
        shards(data, (11, 9))
        return found

    monkeypatch.setattr(job, "_open_source", open_and_change)
    source = CaptionShardsConfig(path=str(data))
    options = job.Options(tokenizer=tokenizer, data=source, out=tmp_path / "out", batch_size=BATCH, device="cpu")
    with pytest.raises(StorageError, match="00001.tar: the shard has changed since it was indexed"):
        job.tokenize_on_ray(options, job.RayOptions(actors=2))


@pytest.mark.slow
def test_a_folder_that_machines_do_not_share_is_refused(tmp_path, tokenizer, ray, monkeypatch, capsys):
    data, out = shards(tmp_path / "in", (3,)), tmp_path / "out"
    monkeypatch.setattr(job, "VISIBLE_S", 0.0)
    monkeypatch.setattr(job.WorkFolder, "existing", lambda *_: None)
    assert main(arguments(tokenizer, data, out)) == 2
    assert f"--out: this machine does not see what a worker of Ray wrote to {out}" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_ray_starts(tmp_path, tokenizer, monkeypatch, refused):
    table = tmp_path / "table.csv"
    table.write_text("filepath,title\n")
    for more, expected in {
        ("--engine", "local"): "--ray-actors: got the local engine; expected --engine ray",
        ("--data", "kind=csv"): "--engine ray: got data of kind csv; expected tars",
    }.items():
        assert expected in refused(main(arguments(tokenizer, table, tmp_path / "out", *more)))
    for name, wrong in (("gpus", "1.5"), ("cpus", "0"), ("actors", "0"), ("gpus", "many")):
        given = arguments(tokenizer, table, tmp_path / "out", f"--ray-{name}", wrong)
        assert f"ray_{name}: got " in refused(main(given))
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = arguments(tokenizer, shards(tmp_path / "in"), tmp_path / "out")
    assert "got several processes of torchrun" in refused(main(given))
    assert not (tmp_path / "out").exists()
