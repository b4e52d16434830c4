"""Real shards; needs VQCLIP_DATA."""

from __future__ import annotations

from pathlib import Path

from tests.tokenize_dataset.making import run, tokenizer_folder
from vqclip.data import CaptionShardsConfig, TokenDataset


def test_captions_and_keys_of_real_shards(real_data: Path, tmp_path: Path) -> None:
    source = CaptionShardsConfig(path=str(real_data / "captions_noto_emoji/val"))
    run(tokenizer_folder(tmp_path / "tokenizer"), source, tmp_path / "out", batch_size=64, tolerance=0.0)
    read = source.build()
    data = TokenDataset(tmp_path / "out")
    assert [item.sample_id for item in data] == list(range(400))
    assert all((item.caption, item.key) == (read.read(n).captions[0], read.key(n)) for n, item in enumerate(data))
