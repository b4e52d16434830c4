"""Token shards as a torch data set, in an order that depends only on (seed, epoch).

data = TokenDataset("tokens/mine")
order = data.sampler(seed=0, rank=rank, world_size=world_size)
loader = DataLoader(data, batch_size=256, sampler=order, collate_fn=collate_tokens, num_workers=2)
for epoch in range(epochs):
    order.set_epoch(epoch)
    for batch in loader:
        batch.image_ids  # (B, N, C) int64
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from vqclip.data.draws import hash_integers
from vqclip.data.lookup import Recent, locate
from vqclip.data.order import GlobalOrder
from vqclip.data.tokens.shards import TokenGroup, TokenRecord, TokenShard, read_manifest
from vqclip.errors import CheckpointError, DataError
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.files import open_regular
from vqclip.seeds import derive_seed

_REMEDY = "copy it again, or run the same `vqclip tokenize` command, which makes it again"
_OPEN_SHARDS = 64
"""Largest number of open files of a process."""
_CACHED_BYTES = 64 << 20
"""Largest size of the decoded groups that a process caches; the last one always stays."""


class TokenItem(NamedTuple):
    """A sample."""

    image_ids: Tensor | None
    """``(N, C)`` int64 from the image tokenizer; None if images were not tokenized."""
    text_ids: Tensor | None
    """``(N, C)`` int64 of the caption, -1 at padding; None if texts were not tokenized."""
    caption: str
    """The caption."""
    sample_id: int
    """Number of the sample over all original shards."""
    label: int
    """Class number, -1 without one."""
    key: str
    """The sample's name in its shard."""


class TokenBatch(NamedTuple):
    """B samples."""

    image_ids: Tensor | None
    """``(B, N, C)`` int64."""
    text_ids: Tensor | None
    """``(B, N, C)`` int64, -1 at padding."""
    captions: tuple[str, ...]
    """B captions."""
    sample_ids: Tensor
    """``(B,)`` int64."""
    labels: Tensor
    """``(B,)`` int64, -1 without one."""
    keys: tuple[str, ...]
    """B names."""


class TokenDataset(Dataset[TokenItem]):
    """A folder from `vqclip tokenize`. Any process can read any sample; needs ``pip install 'vqclip[parquet]'``.

    Args:
        folder: the folder with `manifest.json`.
        verify: compare each shard with its checksum in the manifest when a process first opens it. Sizes, and ids
            outside of their codebooks, are always checked.

    Attributes:
        manifest: the folder's `manifest.json`.
        tokenizer_sha256: modality → `vqclip.tokenizer.stored.fingerprint` of the tokenizer that made the ids, also the
            `tokenizer_sha256` of search indexes and ONNX folders.
        image: `IdLayout` of the image ids: N, codebook sizes; None if images were not tokenized.
        text: the same for texts.

    Raises:
        DataError: the folder is not finished, or a shard is missing or has another size.
    """

    def __init__(self, folder: str | Path, verify: bool = True):
        self.folder = Path(folder).expanduser().absolute()
        self.manifest = read_manifest(self.folder)
        self.image, self.text = self.manifest.settings.image, self.manifest.settings.text
        digests = self.manifest.settings.tokenizer
        self.tokenizer_sha256 = {name: digest for name in ("image", "text") if (digest := getattr(digests, name))}
        self._verify = verify
        self._ends = np.cumsum([0, *(shard.samples for shard in self.manifest.shards)], dtype=np.int64)
        self._shards = Recent[int, TokenShard](_OPEN_SHARDS, close=TokenShard.close)
        self._groups = Recent[tuple[int, int], TokenGroup](_CACHED_BYTES, size=operator.attrgetter("nbytes"))
        for shard in self.manifest.shards:
            path = self.folder / shard.name
            try:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
            if size != shard.size:
                raise DataError(f"{path}: {size} bytes; manifest.json says {shard.size}; {_REMEDY}", "damaged shard")

    def __len__(self) -> int:
        """Return the number of samples in all shards."""
        return int(self._ends[-1])

    def __getitem__(self, place: int | tuple[int, int]) -> TokenItem:
        """Return a sample by its position in the order of the shards.

        Args:
            place: its position, for its first caption; or a pair of its position and a number that selects one of its
                captions, as `TokenSampler` yields.

        Raises:
            DataError: its shard is damaged.
        """
        index, draw = place if isinstance(place, tuple) else (place, 0)
        record = self.record(int(index))
        choice = int(draw) % len(record.captions)
        image = text = None
        if self.image is not None and record.image is not None:
            image = torch.from_numpy(self.image.pad(record.image))
        if self.text is not None and record.texts is not None:
            text = torch.from_numpy(self.text.pad(record.texts[choice]))
        return TokenItem(
            image_ids=image,
            text_ids=text,
            caption=record.captions[choice],
            sample_id=record.sample_id,
            label=record.label,
            key=record.key,
        )

    def record(self, index: int) -> TokenRecord:
        """Return a stored sample with all its captions."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard, row = locate(self._ends, index)
        group, row = locate(self._shards.get(shard, self._open_shard).ends, row)
        return self._groups.get((shard, group), self._read_group).record(row)

    def sampler(
        self, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1, even: bool = False
    ) -> TokenSampler:
        """Return the order of an epoch for torch's `DataLoader`; see `TokenSampler`."""
        return TokenSampler(len(self), seed, shuffle, rank, world_size, even)

    def _read_group(self, place: tuple[int, int]) -> TokenGroup:
        shard, group = place
        return self._shards.get(shard, self._open_shard).read_group(group)

    def _open_shard(self, number: int) -> TokenShard:
        facts = self.manifest.shards[number]
        path = self.folder / facts.name
        if self._verify:
            try:
                verify_file(path, FileDigest(size=facts.size, sha256=facts.sha256), "manifest.json")
            except CheckpointError as error:
                raise DataError(f"{error}; {_REMEDY}", "damaged shard") from None
        shard = TokenShard(path, self.image, self.text)
        if len(shard) != facts.samples:
            raise DataError(
                f"{path}: contains {len(shard)} samples; manifest.json says {facts.samples}", "damaged shard"
            )
        return shard


class TokenSampler(Sampler[tuple[int, int]]):
    """One rank's part of an epoch: positions ``rank::world_size`` of an order that depends only on (seed, epoch).

    The parts of all ranks together contain every sample exactly once. The order is `GlobalOrder`'s, which stores
    nothing.

    Args:
        size: samples in the data set.
        seed: selects the order and the captions.
        shuffle: False for the order of the shards, and first captions.
        rank: this rank.
        world_size: W.
        even: skip the last ``size mod W`` positions, so that all ranks have the same number; otherwise they may differ
            by one.
    """

    def __init__(self, size: int, seed: int, shuffle: bool, rank: int, world_size: int, even: bool):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: got {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
        self._positions = range(rank, size - size % world_size if even else size, world_size)
        self._size = size
        self._shuffle = shuffle
        self._order = GlobalOrder([size], [1.0], derive_seed(seed, "tokens", "order"), batch_size=1) if size else None
        self._caption_seed = derive_seed(seed, "tokens", "caption")
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples in an epoch."""
        return len(self._positions)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield positions of samples, each with a number that selects its caption."""
        epoch = self.epoch
        for start in range(0, len(self._positions), 4096):
            some = self._positions[start : start + 4096]
            positions = np.arange(some.start, some.stop, some.step, dtype=np.int64)
            if not self._shuffle or self._order is None:
                yield from ((place, 0) for place in positions.tolist())
                continue
            places = self._order[epoch * self._size + positions].sample
            draws = hash_integers(self._caption_seed, epoch, places) >> np.uint64(1)
            yield from zip(places.tolist(), draws.tolist(), strict=True)


def collate_tokens(items: Sequence[TokenItem]) -> TokenBatch:
    """Combine samples into a batch; for the `collate_fn` of torch's `DataLoader`."""
    columns = [[*column] for column in zip(*items, strict=True)]
    images, texts, captions, ids, labels, keys = columns
    return TokenBatch(
        image_ids=None if images[0] is None else torch.stack(images),
        text_ids=None if texts[0] is None else torch.stack(texts),
        captions=tuple(captions),
        sample_ids=torch.tensor(ids, dtype=torch.int64),
        labels=torch.tensor(labels, dtype=torch.int64),
        keys=tuple(keys),
    )
