"""Hold out a share of the samples of a source, by a hash of their names: nothing is drawn, and nothing is stored.

    a sample is held out  <=>  hash(its place in the data) < share · 2^64, or of few samples: it is the least of all

So an image of a folder, or named by a table, stays on its side when others are added or removed (but a new one may
take the place of the least of few), and a smaller share is a part of a larger one. Places in Parquet files and hub data
sets contain row numbers, which may move.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vqclip.data.sources.base import RawSample, Source
from vqclip.errors import DataError

HeldOutShare = Annotated[float, Field(gt=0, lt=1)]
"""Share of the samples that are held out."""

_ROW = re.compile(r" \(row \d+\)$")


class PartOfSource:
    """A `Source` of some samples of another one, in the same order.

    Args:
        source: the samples.
        share: share of them that is held out.
        held_out: True: those that are held out; False: the others.

    Raises:
        DataError: no sample is left to train on.
    """

    def __init__(self, source: Source, share: float, held_out: bool):
        place = getattr(source, "place", source.name)  # the row of a table is left out, so that rows may be added

        def number(index: int) -> int:
            name = _ROW.sub("", place(index)).encode("utf-8", "surrogatepass")
            return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

        numbers = np.fromiter(map(number, range(len(source))), dtype=np.uint64, count=len(source))
        limit = max(math.ceil(share * 2**64), int(numbers.min(initial=2**64 - 1)) + 1)
        rows = np.flatnonzero((numbers < limit) == held_out)
        if not len(rows):
            raise DataError(
                f"held_out: got {share:g}, with which all of the {len(source)} samples are held out; expected more "
                "samples, another share, or other data to evaluate on (vqclip train: --val)"
            )
        self._source, self._rows, self._place = source, rows, place
        self.config = getattr(source, "config", None)
        side = "held out" if held_out else "others"
        # Other names of the same content would choose other samples.
        self._facts = {"held_out": share, "side": side, "rows_sha256": hashlib.sha256(self._rows.tobytes()).hexdigest()}
        self.classnames, self.templates = source.classnames, source.templates
        self.notes: tuple[str, ...] = tuple(getattr(source, "notes", ()))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> RawSample:
        """Read one sample; see `Source.read`."""
        return self._source.read(int(self._rows[index]))

    def name(self, index: int) -> str:
        """Return shard and sample; see `Source.name`."""
        return self._source.name(int(self._rows[index]))

    def place(self, index: int) -> str:
        """Return the path of the sample below the opened folder; see `ShardedSource.place`."""
        return str(self._place(int(self._rows[index])))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        return {**self._source.fingerprint, **self._facts}
