"""Encode samples of a source as members of WebDataset tars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from vqclip.data import RawSample, Source
from vqclip.data.decode import decode_image, image_format
from vqclip.data.sources.reader import MAX_BYTES
from vqclip.errors import DataError

__all__ = ["PackedSample", "SamplePacker"]


class PackedSample(NamedTuple):
    """A usable sample."""

    key: str
    members: dict[str, bytes]
    """Ending → content: an image with its bytes unchanged, txt and json, or cls."""
    captions: int
    """Number of captions."""

    @property
    def size(self) -> int:
        """Bytes in a tar, headers included."""
        return sum(512 + -(-len(data) // 512) * 512 for data in self.members.values())


class SamplePacker:
    """Reads samples of a source, checks that each can be used, and names its members; runs in the workers.

    Keys are those of img2dataset: number of the shard, then number of the sample in it.

    Args:
        source: the samples.
        shard_size: samples in a shard, unusable ones included.
        max_pixels: larger images are bad samples.
    """

    def __init__(self, source: Source, shard_size: int, max_pixels: int):
        self._source, self._max_pixels = source, max_pixels
        self._shard_size, self._digits = shard_size, max(4, len(str(shard_size - 1)))

    def key(self, index: int) -> str:
        """Return the key of a sample."""
        return f"{index // self._shard_size:05d}{index % self._shard_size:0{self._digits}d}"

    def __call__(self, index: int) -> PackedSample:
        """Return the members of one sample.

        Raises:
            DataError: it cannot be read or decoded; the message names it.
        """
        key = self.key(index)
        sample = self._source.read(index)
        try:
            decode_image(sample.image, self._max_pixels)
            members = {image_format(sample.image).replace("jpeg", "jpg"): sample.image}
            if self._source.classnames:
                members["cls"] = _class_number(sample.label, len(self._source.classnames))
            if not self._source.templates:
                members |= _caption_members(key, sample)
            for name, data in members.items():
                limit = MAX_BYTES.get(name, MAX_BYTES["image"])
                if len(data) > limit:
                    raise DataError(f".{name} of {len(data)} bytes; at most {limit} are read", "too many bytes")
        except DataError as error:
            raise DataError(f"{self._source.name(index)}: {error}", error.kind) from error
        return PackedSample(key, members, len(sample.captions))


def _class_number(label: int, classes: int) -> bytes:
    if not 0 <= label < classes:
        raise DataError(f"class {label}; expected a class number, 0 to {classes - 1}", "class number")
    return str(label).encode()


def _caption_members(key: str, sample: RawSample) -> dict[str, bytes]:
    """Return the first caption as .txt, and all as .json: a string, or a list of several."""
    captions: Sequence[str] | str = sample.captions if len(sample.captions) > 1 else sample.captions[0]
    try:
        text = sample.captions[0].encode()
        data = json.dumps({"key": key, "caption": captions}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"caption with a lone surrogate at character {error.start}", "not UTF-8") from None
    return {"txt": text, "json": data}
