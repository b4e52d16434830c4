"""Real data sets, whole; needs VQCLIP_DATA.

    VQCLIP_DATA=FOLDER python -m pytest -m slow -s tests/tokenize_dataset/test_real_data.py

The tokenizers are untrained ones of `configs/`, unless VQCLIP_TOKENIZERS names a folder with ``captions/tokenizer`` and
``eurosat/tokenizer`` in it, such as ``runs``.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.tokenize_dataset.making import hashes, run, tokenizer_folder
from vqclip import load_tokenizer
from vqclip.config import load_config
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, TokenDataset, decode_image
from vqclip.train import TrainConfig

ROOT = Path(__file__).parents[2]
SETS = {
    "emoji": ("captions", CaptionShardsConfig, ("captions_noto_emoji/train", "captions_noto_emoji/val"), 3520),
    "pomological": ("captions", CaptionShardsConfig, ("captions_pomological/train", "captions_pomological/val"), 2894),
    "eurosat train": ("eurosat", ClassShardsConfig, "train", 2500),
    "eurosat test": ("eurosat", ClassShardsConfig, "test", 1000),
}


def test_captions_and_keys_of_real_shards(real_data: Path, tmp_path: Path) -> None:
    source = CaptionShardsConfig(path=str(real_data / "captions_noto_emoji/val"))
    run(tokenizer_folder(tmp_path / "tokenizer"), source, tmp_path / "out", batch_size=64, tolerance=0.0)
    read = source.build()
    data = TokenDataset(tmp_path / "out")
    assert [item.sample_id for item in data] == list(range(400))
    assert all((item.caption, item.key) == (read.read(n).captions[0], read.key(n)) for n, item in enumerate(data))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETS)
def test_whole_sets_by_one_process_two_and_a_killed_job(real_data: Path, tmp_path: Path, name: str) -> None:
    config, kind, where, count = SETS[name]
    tokenizer = _tokenizer(tmp_path, config)
    if kind is CaptionShardsConfig:
        paths = [str(real_data / path) for path in where]
        source, options = CaptionShardsConfig(path=tuple(paths)), ["--data", *paths]
    else:
        folder = real_data / "cls_eurosat"
        source = ClassShardsConfig(path=folder, split=where)
        options = ["--data", str(folder), "kind=classes", f"split={where}"]
    options += ["--tokenizer", tokenizer, "--device", "cpu", "--tolerance", "0", "--workers", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]

    _finish([sys.executable, "-m", "vqclip", "tokenize", *options, "--out", str(tmp_path / "one")])
    expected = hashes(tmp_path / "one")
    _finish([*torchrun, "vqclip", "tokenize", *options, "--out", str(tmp_path / "two")])
    assert hashes(tmp_path / "two") == expected
    killed = tmp_path / "killed"
    _kill_in_the_middle(
        [*torchrun, "vqclip", "tokenize", *options, "--out", str(killed)], killed, len(source.tars()) <= 2
    )
    _finish([sys.executable, "-m", "vqclip", "tokenize", *options, "--out", str(killed)])
    assert hashes(killed) == expected

    data, read = TokenDataset(tmp_path / "one"), source.build()
    assert [item.sample_id for item in data] == list(range(count)) == list(range(len(read)))
    rates = _rates(tokenizer, data, read)
    print(f"\n{name}: ids equal to one-by-one encoding: " + ", ".join(f"{k} {v:.4%}" for k, v in rates.items()))
    assert rates["images"] >= 0.9999
    assert rates["texts"] >= 0.9999


def _tokenizer(folder: Path, config: str) -> str:
    if trained := os.environ.get("VQCLIP_TOKENIZERS"):
        return str(Path(trained) / config / "tokenizer")
    torch.manual_seed(0)
    made = load_config(TrainConfig, ROOT / "configs" / f"{config}.yaml", []).model.build().eval()
    made.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr


def _kill_in_the_middle(command: list[str], out: Path, few: bool) -> None:
    """Kill a whole job when one shard is done, or, if there are only a `few`, when some batches are done."""
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        job = subprocess.Popen(command, env=_environment(), stderr=output, start_new_session=True)
    end = time.monotonic() + 1200
    while not (list(out.glob("records/*.json")) or (few and re.search(rb"[1-9]\d*/\d+ left", log.read_bytes()))):
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(job.pid, signal.SIGKILL)
    for child in children:  # torchrun's ranks; their data workers die with them
        os.kill(int(child), signal.SIGKILL)
    job.wait(60)
    assert not (out / "manifest.json").exists()


def _rates(tokenizer: str, data: TokenDataset, read) -> dict[str, float]:
    """Shares of ids that are those of samples encoded alone: from the same pixels, and from Pillow's."""
    image, text = load_tokenizer(tokenizer, "image"), load_tokenizer(tokenizer, "text")
    known: dict[str, torch.Tensor] = {}
    equal: dict[str, list[float]] = {"images": [], "images read by Pillow": [], "texts": []}
    for record, ids, own in _padded(data):
        raw = read.read(record.sample_id)
        alone = image.encode(image.transform(decode_image(raw.image))[None])[0]
        pillow = image.encode(Image.open(io.BytesIO(raw.image)))[0]
        equal["images"].append(float((alone == ids).double().mean()))
        equal["images read by Pillow"].append(float((pillow == ids).double().mean()))
        for caption, stored in zip(record.captions, own, strict=True):
            if caption not in known:
                known[caption] = text.encode([caption])[0]
            equal["texts"].append(float((known[caption] == stored)[known[caption] >= 0].double().mean()))
            assert torch.equal(known[caption] < 0, stored < 0)
    return {kind: sum(shares) / len(shares) for kind, shares in equal.items()}


def _padded(data: TokenDataset) -> Iterator[tuple]:
    for n in range(len(data)):
        record = data.record(n)
        yield record, data[n].image_ids, [data[n, draw].text_ids for draw in range(len(record.captions))]
