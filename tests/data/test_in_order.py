"""Samples in order: bad ones are noted, and storage that fails is nobody's sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vqclip.data import RawSample
from vqclip.data.in_order import InOrderReader, ShardSlices, read_in_order
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
    batches = InOrderReader(Source(DataError).read, ShardSlices([2, 0, 3], [0, 1, 2], 2))
    read = [batches(number) for number in range(len(batches))]
    assert [(each.shard, [*each.ids], [*each.found]) for each in read] == [
        (0, [0, 1], [0, 1]),
        (1, [], []),
        (2, [2, 3], [2]),
        (2, [4], [4]),
    ]
    assert [(bad.sample_id, bad.kind, bad.reason) for each in read for bad in each.bad] == [
        (3, "missing", "sample 3: gone")
    ]
    problems = [sample.problem for sample in scan(Source(DataError), CheckOptions())]  # type: ignore[arg-type]
    assert problems[3] == ("missing", "gone")
    assert len(problems) == 5


def test_storage_that_fails_is_an_error() -> None:
    source = Source(StorageError)
    with pytest.raises(StorageError, match="gone"):
        read_in_order(source.read, range(5))
    with pytest.raises(StorageError, match="gone"):
        list(scan(source, CheckOptions()))  # type: ignore[arg-type]
