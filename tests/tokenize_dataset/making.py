import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.data.making import caption_members, write_tar
from tests.models import FSQ, tiny_model
from vqclip.data import CaptionShardsConfig
from vqclip.data.work_folder import WorkResult
from vqclip.tokenize_dataset.job import Options, tokenize

COUNTS = (11, 8, 3, 9)
BATCH = 4


def tokenizer_folder(folder: Path, image: Mapping[str, Any] = FSQ, text: Mapping[str, Any] = FSQ, seed: int = 0) -> str:
    torch.manual_seed(seed)
    tiny_model(dict(image), dict(text)).build().eval().save_pretrained(folder)
    return str(folder)


def shards(folder: Path, counts: tuple[int, ...] = COUNTS, damaged: tuple[int, ...] = ()) -> Path:
    """Caption shards, one caption of two words or more for each; the numbers of `damaged` have no readable image."""
    first = 0
    for shard, count in enumerate(counts):
        members = caption_members(first, count)
        for number in range(first, first + count):
            members[f"{number:09d}.txt"] = ("a red dog " * (number % 3) + f"caption {number}").encode()
            if number in damaged:
                members[f"{number:09d}.jpg"] = members[f"{number:09d}.jpg"][:40]
        write_tar(folder / f"{shard:05d}.tar", members)
        first += count
    return folder


def run(tokenizer: str, data: Path | Any, out: Path, **changes: Any) -> WorkResult:
    source = CaptionShardsConfig(path=str(data)) if isinstance(data, Path) else data
    settings = {"batch_size": BATCH, "device": "cpu", **changes}
    return tokenize(Options(tokenizer=str(tokenizer), data=source, out=out, **settings))


def hashes(folder: Path) -> dict[str, str]:
    """Hash of every file in a folder and below."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
