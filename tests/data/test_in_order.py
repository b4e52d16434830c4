"""Samples in order: each once, bad ones are noted, and storage that fails is nobody's sample."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.making import caption_shards, encode, pixels
from vqclip.data import CaptionShardsConfig, EvalSet, EvalTransformConfig, RawSample, decode_image
from vqclip.data.in_order import read_in_order, slices_of
from vqclip.data_tools.check import CheckOptions, scan
from vqclip.errors import DataError, StorageError


class Source:
    classnames = templates = ()

    def __init__(self, error: Callable[[str, str], Exception]):
        self.error = error

    def __len__(self) -> int:
        return 5

    def name(self, index: int) -> str:
        return f"sample {index}"

    def read(self, index: int) -> RawSample:
        if index == 3:
            raise self.error(f"sample {index}: gone", "missing")
        return RawSample(b"", ("a caption",), index)


def test_bad_samples_are_noted_in_their_batch() -> None:
    read = [read_in_order(Source(DataError).read, ids) for ids in slices_of(range(5), 2)]
    assert [([*each.ids], [*each.found]) for each in read] == [([0, 1], [0, 1]), ([2, 3], [2]), ([4], [4])]
    (bad,) = [bad for each in read for bad in each.bad]
    assert (bad.sample_id, bad.kind, bad.reason) == (3, "missing", "sample 3: gone")
    problems = [sample.problem for sample in scan(Source(DataError), CheckOptions())]  # type: ignore[arg-type]
    assert problems[3] == ("missing", "gone")
    assert len(problems) == 5


def test_storage_that_fails_is_an_error() -> None:
    source = Source(StorageError)
    with pytest.raises(StorageError, match="gone"):
        read_in_order(source.read, range(5))
    with pytest.raises(StorageError, match="gone"):
        list(scan(source, CheckOptions()))  # type: ignore[arg-type]


# ---- evaluation

TRANSFORM = EvalTransformConfig().build(16)


def test_every_sample_in_order_or_a_few_spread_over_all(tmp_path: Path) -> None:
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (5, 4)))).build()
    batches = list(EvalSet(source, TRANSFORM, batch_size=4))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(9))
    assert [captions for batch in batches for captions in batch.captions] == [(f"caption {n}",) for n in range(9)]
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images[6], TRANSFORM(decode_image(encode(pixels(6)))))
    (spread,) = EvalSet(source, TRANSFORM, limit=3)
    assert spread.sample_ids.tolist() == [0, 3, 6]
    assert len(EvalSet(source, TRANSFORM, limit=100)) == 9


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 2), (12, 0)])
def test_ranks_share_it_without_remainder(tmp_path: Path, world_size: int, workers: int) -> None:
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (5, 4)))).build()
    parts = [EvalSet(source, TRANSFORM, 2, rank, world_size, workers) for rank in range(world_size)]
    assert sum(len(part) for part in parts) == 9
    ids = [int(i) for part in parts for batch in part for i in batch.sample_ids]
    assert sorted(ids) == list(range(9))
