"""Training data for tests of the loader, and how ranks' batches make global ones."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vqclip.data import Batch, CaptionShardsConfig, ClassShardsConfig, DataConfig, TrainData

SIZE = 16
G = 10


def tokenize(captions: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Bytes of the caption, (B, 40) int64, 0-padded; and their number."""
    rows = torch.zeros(len(captions), 40, dtype=torch.int64)
    for row, caption in zip(rows, captions, strict=True):
        data = torch.tensor(list(caption.encode()), dtype=torch.int64)
        row[: len(data)] = data
    return rows, [len(caption) for caption in captions]


def text(row: torch.Tensor) -> str:
    return bytes(row[row > 0].tolist()).decode()


def open_data(folder: Path, seed: int = 0, batch_size: int = G, **options) -> TrainData:
    """Two caption sources and one of classes."""
    weight = options.pop("weight", 0.5)
    sources = options.pop("sources", None) or (
        CaptionShardsConfig(path=str(folder / "a")),
        CaptionShardsConfig(path=str(folder / "b"), weight=weight, captions="json", json_keys=("many",)),
        ClassShardsConfig(path=folder / "c"),
    )
    config = DataConfig(sources=sources, **{"workers": 0, **options})
    return config.build(size=SIZE, tokenize=tokenize, batch_size=batch_size, seed=seed)


def global_batch(parts: list[Batch]) -> tuple[torch.Tensor, ...]:
    assert len({(part.step, part.epoch) for part in parts}) == 1
    total = sum(len(part) for part in parts)
    result = []
    for name in ("sample_ids", "images", "texts", "labels"):
        tensors = [getattr(part, name) for part in parts]
        whole = torch.empty(total, *tensors[0].shape[1:], dtype=tensors[0].dtype)
        for part, tensor in zip(parts, tensors, strict=True):
            whole[part.places] = tensor
        result.append(whole)
    return tuple(result)


def global_batches(
    data: TrainData, start: int, stop: int, world_size: int, nodes: Sequence[int] | None = None
) -> list[tuple[torch.Tensor, ...]]:
    ranks = [list(data.batches(start, stop, rank, nodes or (0,) * world_size)) for rank in range(world_size)]
    return [global_batch(list(parts)) for parts in zip(*ranks, strict=True)]


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
