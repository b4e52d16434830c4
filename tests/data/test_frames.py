from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.data.loading import SIZE, tokenize
from tests.data.making import caption_shards
from vqclip.data import CaptionShardsConfig, DataConfig


@pytest.mark.parametrize("order", ["full", "windowed"])
def test_a_sample_passes_seven_calls_to_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """The path in the docstring of `vqclip.data`, `fill` and `os.pread` included."""
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (4,))))
    data = DataConfig(sources=(source,), order=order, workers=0).build(SIZE, tokenize, 4, 0)
    paths: set[tuple[str, ...]] = set()
    read = os.pread

    def count(*arguments: int) -> bytes:
        frame, names = sys._getframe(1), ["pread"]
        while frame is not None and names[-1] != "fill":
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        paths.add(tuple(reversed(names)))
        return read(*arguments)

    monkeypatch.setattr(os, "pread", count)
    next(data.batches(0, 1))
    assert paths == {("fill", "make", "_make", "read", "read", "read", "pread")}
