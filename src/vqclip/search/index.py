"""An index of ids: the code of every item, in as few bits as it needs, and its name.

Shapes: n items, U distinct codes, N tokens, C codebooks, K codes a codebook.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS, NumTokens
from vqclip.data import EvalSet, ShardedSource
from vqclip.data.in_order import read_captions
from vqclip.errors import CheckpointError, DataError, ShapeError
from vqclip.io.atomic import FileDigest, digest_file, replace_folder, require_replaceable, verify_file
from vqclip.io.json_files import add_checksum, read_checked
from vqclip.io.tensors import open_tensors, save_tensors, shape_differences
from vqclip.nn.inputs import require_codes, require_ids
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer
from vqclip.tokenizer.folder import ID_LAYOUT_VERSION
from vqclip.tokenizer.stored import fingerprint

INDEX_FILE = "index.json"
CODES_FILE = "codes.safetensors"
MOST_ITEMS = 2**31 - 1
"""Range of the int32 of `CodeIndex.row`."""
_VERSIONS = {"format": "vqclip-index", "format_version": 5, "id_layout": ID_LAYOUT_VERSION}


_PACKED = 4096
"""Items packed at a time; meanwhile each bit takes a byte."""


@dataclass(frozen=True)
class Packing:
    """Layout of the ids ``(N, C)`` of an item as bytes: token after token, codebook after codebook, without gaps.

    An id takes ceil(log2 K) bits, highest first; the last byte is padded with zeros. If tokens may be absent (-1), 0
    means absent, id k becomes k + 1, and an id takes the bits of K + 1 values.
    """

    num_tokens: int
    """N."""
    codebook_sizes: tuple[int, ...]
    """K of each of the C codebooks."""
    absent: bool
    """Whether ids may be -1."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of an id of each codebook."""
        return tuple((size - 1 + self.absent).bit_length() for size in self.codebook_sizes)

    @property
    def bits(self) -> int:
        """Bits of an item."""
        return self.num_tokens * sum(self.widths)

    @property
    def bytes(self) -> int:
        """Bytes of an item."""
        return -(-self.bits // 8)

    def pack(self, ids: Tensor) -> Tensor:
        """Pack ids ``(n, N, C)`` of any integer type into ``(n, bytes)`` uint8.

        Raises:
            ShapeError: for another shape, or an id that is out of range.
        """
        self._require(ids)
        parts = [self._pack(part.long().cpu().numpy()) for part in ids.split(_PACKED)]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, self.bytes, dtype=torch.uint8)

    def unpack(self, codes: Tensor) -> Tensor:
        """Unpack ``(n, bytes)`` uint8 into ids ``(n, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id out of range.
        """
        if codes.ndim != 2 or codes.shape[1] != self.bytes or codes.dtype != torch.uint8:
            raise ShapeError(f"codes: got {tuple(codes.shape)} {codes.dtype}, expected (n, {self.bytes}) torch.uint8")
        parts = [self._unpack(part.numpy()) for part in codes.split(_PACKED)]
        shape = (0, self.num_tokens, len(self.codebook_sizes))
        ids = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(shape, dtype=torch.int64)
        self._require(ids)
        return ids

    def _pack(self, ids: np.ndarray) -> np.ndarray:
        numbers = ids.astype(np.uint64) + np.uint64(self.absent)  # -1 wraps around to 0
        bits = np.empty((*ids.shape[:2], sum(self.widths)), dtype=np.uint8)
        for column, shift, codebook in self._columns():
            bits[..., column] = (numbers[..., codebook] >> np.uint64(shift)) & np.uint64(1)
        return np.packbits(bits.reshape(len(ids), self.bits), axis=1)

    def _unpack(self, codes: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(codes, axis=1, count=self.bits)
        bits = bits.reshape(len(codes), self.num_tokens, sum(self.widths))
        numbers = np.zeros((*bits.shape[:2], len(self.codebook_sizes)), dtype=np.uint64)
        for column, shift, codebook in self._columns():
            numbers[..., codebook] |= bits[..., column].astype(np.uint64) << np.uint64(shift)
        return (numbers - np.uint64(self.absent)).astype(np.int64)

    def _columns(self) -> Sequence[tuple[int, int, int]]:
        """Return ``(column in the packed bits, position in the id, codebook)`` of each bit of a token."""
        places = [(c, shift) for c, width in enumerate(self.widths) for shift in reversed(range(width))]
        return [(column, shift, codebook) for column, (codebook, shift) in enumerate(places)]

    def _require(self, ids: Tensor) -> None:
        wide = require_codes(ids, self.codebook_sizes, samples=True)
        if wide.shape[1] != self.num_tokens:
            raise ShapeError(f"ids: got {wide.shape[1]} tokens, expected {self.num_tokens}")
        if not self.absent and bool((wide < 0).any()):
            raise ShapeError("ids: got -1, expected none, as the packing has no absent ids")


def _is_local(path: str) -> str:
    if not Path(path).is_absolute() or "://" in path:
        raise ValueError(f"got {path!r}, expected an absolute path: an index cannot cause a download")
    return path


LocalPath = Annotated[str, AfterValidator(_is_local)]


class Origin(Config):
    """Source of an index, so that it need not be given again to search it and to show the results."""

    tokenizer: LocalPath | None = None
    """The tokenizer folder; None if it was not a local folder."""
    images: LocalPath | None = None
    """Path of the data; None for a URL, or several paths."""
    fingerprint: dict[str, Any] = {}
    """Fingerprint of the source: in another one the numbers of the items would mean other images."""


class _Header(Config):
    """``index.json`` without its format and versions."""

    modality: str
    tokenizer_sha256: str
    codebook_sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(min_length=1, max_length=MAX_CODEBOOKS)
    num_tokens: NumTokens
    absent: bool
    items: int = Field(ge=0, le=MOST_ITEMS)
    codes: FileDigest
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False)
class CodeIndex:
    """Items by their codes. Equal codes are stored once, so that equal items have equal scores.

    `build` and `load` make one.
    """

    codes: Tensor
    """``(U, bytes)`` uint8: the distinct codes, packed; in the order of the items if all are distinct."""
    row: Tensor | None
    """``(n,)`` int32: row of each item's code; None if all are distinct."""
    names: Sequence[str]
    """Name of each item."""
    packing: Packing
    """Layout of the ids in the codes."""
    modality: str
    """``image`` or ``text``: modality of the ids."""
    tokenizer_sha256: str
    """`vqclip.tokenizer.stored.fingerprint` of the tokenizer that made the ids."""
    places: Tensor | None = None
    """``(n,)`` int64: number of each item in its source; None if it is the item's own number."""
    origin: Origin = field(default_factory=Origin)
    """Source of the items."""

    @staticmethod
    def build(
        tokenizer: Tokenizer,
        ids: Tensor,
        names: Sequence[str] | None = None,
        places: Tensor | None = None,
        origin: Origin | None = None,
    ) -> CodeIndex:
        """Build an index of ids.

        Args:
            tokenizer: the tokenizer that made them.
            ids: ``(n, N, C)``, of any integer type; -1 for absent tokens.
            names: names of the items; their numbers by default.
            places: ``(n,)`` int64, numbers of the items in the source.
            origin: the source.

        Raises:
            ShapeError: ids that are not this tokenizer's, or another number of names.
        """
        ids = require_ids(ids)
        names = [str(number) for number in range(len(ids))] if names is None else list(names)
        if len(names) != len(ids) or len(ids) > MOST_ITEMS:
            raise ShapeError(f"names: got {len(names)} for {len(ids)} items, expected one each, at most {MOST_ITEMS}")
        absent = bool((ids < 0).any())
        packing = Packing(tokenizer.num_tokens, tuple(tokenizer.codebook_sizes), absent)
        codes, row = packing.pack(ids), None
        table = np.ascontiguousarray(codes.numpy())
        whole = table.view(np.dtype((np.void, packing.bytes))).reshape(-1)
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
        if len(first) < len(codes):
            codes, row = torch.from_numpy(table[first]), torch.from_numpy(inverse.reshape(-1).astype(np.int32))
        sha256 = fingerprint(tokenizer)
        return CodeIndex(codes, row, names, packing, tokenizer.modality, sha256, places, origin or Origin())

    def __len__(self) -> int:
        return len(self.codes) if self.row is None else len(self.row)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: codes and rows, without the names."""
        return self.codes.numel() + (0 if self.row is None else 4 * len(self.row))

    def ids(self, items: Tensor) -> Tensor:
        """Return the ids ``(M, N, C)`` int64 of items ``(M,)``."""
        rows = items if self.row is None else self.row[items].long()
        return self.packing.unpack(self.codes[rows])

    def save(self, folder: str | Path) -> None:
        """Write ``index.json`` and ``codes.safetensors``.

        An existing index is replaced atomically (`vqclip.io.atomic.replace_folder`).

        Raises:
            ConfigError: the folder contains something else.
        """
        require_replaceable(Path(folder), INDEX_FILE, CODES_FILE)
        replace_folder(Path(folder), self._fill)

    def _fill(self, folder: Path) -> None:
        names = torch.frombuffer(bytearray(json.dumps(list(self.names)).encode()), dtype=torch.uint8)
        tensors = {"codes": self.codes.contiguous(), "names": names, "row": self.row, "places": self.places}
        save_tensors({name: each for name, each in tensors.items() if each is not None}, folder / CODES_FILE)
        header = _Header(
            modality=self.modality,
            tokenizer_sha256=self.tokenizer_sha256,
            codebook_sizes=self.packing.codebook_sizes,
            num_tokens=self.packing.num_tokens,
            absent=self.packing.absent,
            items=len(self),
            codes=digest_file(folder / CODES_FILE),
            origin=self.origin,
        )
        (folder / INDEX_FILE).write_bytes(add_checksum(_VERSIONS | header.model_dump(mode="json")))

    @staticmethod
    def load(folder: str | Path) -> CodeIndex:
        """Read an index; every byte is compared with its checksum.

        Raises:
            CheckpointError: a file is missing, damaged, of another version, or has other content than expected.
        """
        path, hint = Path(folder) / CODES_FILE, "; expected the folder of an index"
        remedy = "build the index again (`vqclip search build`)"
        header = read_checked(path.with_name(INDEX_FILE), _Header, _VERSIONS, remedy, hint)
        verify_file(path, header.codes, INDEX_FILE)
        with open_tensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        packing = Packing(header.num_tokens, header.codebook_sizes, header.absent)
        _require_tensors(path, tensors, packing, header.items)
        try:
            names = json.loads(tensors["names"].numpy().tobytes())
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or len(names) != header.items or any(type(each) is not str for each in names):
            raise CheckpointError(f"{path}: names: expected a list of {header.items} texts")
        return CodeIndex(
            tensors["codes"],
            tensors.get("row"),
            names,
            packing,
            header.modality,
            header.tokenizer_sha256,
            tensors.get("places"),
            header.origin,
        )


def _require_tensors(path: Path, tensors: dict[str, Tensor], packing: Packing, items: int) -> None:
    """Check the tensors of an index of so many items; raise CheckpointError if one does not fit."""
    rows = {name: (*each.shape, 0)[0] for name, each in tensors.items()}
    codes = rows.get("codes", 0) if "row" in tensors else items
    shapes = {"codes": (codes, packing.bytes), "names": (rows.get("names", 0),)}
    shapes |= {name: (items,) for name in ("row", "places") if name in tensors}
    problems = shape_differences(shapes, {name: tuple(each.shape) for name, each in tensors.items()})
    dtypes = {"codes": torch.uint8, "names": torch.uint8, "row": torch.int32, "places": torch.int64}
    wrong = [name for name in shapes.keys() & tensors.keys() if tensors[name].dtype != dtypes[name]]
    problems += [f"{name}: got {tensors[name].dtype}, expected {dtypes[name]}" for name in wrong]
    for name, count in (("row", codes), ("places", 2**63)):
        if not problems and items and name in tensors:
            least, most = int(tensors[name].min()), int(tensors[name].max())
            if least < 0 or most >= count:
                problems.append(f"{name}: got {least} to {most}, expected 0 to {count - 1}")
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(sorted(problems)))


def build_index(
    tokenizer: ImageTokenizer | TextTokenizer,
    source: ShardedSource,
    batch_size: int = 64,
    bad_fraction: float = 0.0,
    origin: Origin | None = None,
) -> CodeIndex:
    """Build an index of the images of a source, or of its captions if the tokenizer is one of texts.

    The name of an item is its image's place in the source, followed by the caption or class if the data has one:
    ``pets/cat.png``, ``00003.tar/000031415: a red apple``.

    Raises:
        DataError: more than ``bad_fraction`` of the images or captions cannot be used.
    """
    ids, items = list[Tensor](), list[tuple[int, str]]()  # number of the image, and its text
    if isinstance(tokenizer, ImageTokenizer):
        for batch in EvalSet(source, tokenizer.transform, batch_size, max_bad_fraction=bad_fraction):
            if len(batch):
                ids.append(tokenizer.encode(batch.images).cpu())
                texts = [captions[0] for captions in batch.captions]
                if source.classnames:
                    texts = [source.classnames[label] for label in batch.labels.tolist()]
                items += zip(batch.sample_ids.tolist(), texts, strict=True)
    else:
        read = read_captions(source, bad_fraction)
        items = [(index, caption) for index, captions in read.items() for caption in captions]
        for start in range(0, len(items), batch_size):
            ids.append(tokenizer.encode([caption for _, caption in items[start : start + batch_size]]).cpu())
    if not ids:
        raise DataError("got no items, expected at least one")
    named = getattr(source.config, "captions", None) == "names"  # the caption says nothing that the place does not
    names = [source.place(index) + ("" if named else f": {text}") for index, text in items]
    places = torch.tensor([index for index, _ in items])
    same = torch.equal(places, torch.arange(len(names)))
    return CodeIndex.build(tokenizer, torch.cat(ids), names, None if same else places, origin)
