"""Fuzzing of the readers of foreign files, and what it found before."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fuzz.__main__ import READERS

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
SECONDS = float(os.environ.get("VQCLIP_FUZZ_S", "60"))
FOUND = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.timeout(60)
def test_what_was_found_stays_mended(path: Path, tmp_path: Path) -> None:
    READERS[path.parent.name].check(path.read_bytes(), tmp_path)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_seeds_are_read(reader: ModuleType, tmp_path: Path) -> None:
    assert {reader.check(data, tmp_path) for data in reader.seeds()} == {"read"}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_few_cases(reader: ModuleType, tmp_path: Path) -> None:
    known = reader.seeds()
    cases = [reader.case(random.Random(f"few-{number}"), known) for number in range(40)]
    assert len(set(cases)) > 20
    assert "refused" in {reader.check(data, tmp_path) for data in cases}


@pytest.mark.faults
@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(0)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    """10,000 images; the others for a minute each, or as many seconds as VQCLIP_FUZZ_S says.

    VQCLIP_FUZZ_SEED chooses the cases.
    """
    seed = os.environ.get("VQCLIP_FUZZ_SEED", "0")
    cases = 10_000 if name == "images" else 0
    options = {"seconds": SECONDS, "seed": seed, "cases": cases, "found": tmp_path / "found"}
    command = [sys.executable, "-m", "tests.fuzz", name, *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=SECONDS + 180 + cases / 5,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["found"] == {}
    assert result["cases"] >= (cases or SECONDS / 10)
    assert result["grown_mb"] < 300
