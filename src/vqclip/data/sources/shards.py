"""Caption shards: WebDataset tars in img2dataset's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from vqclip.data.remote import RemoteConfig, display_url, is_tar
from vqclip.data.shard import Part, Shard
from vqclip.data.sources.base import FolderContent, OpensSource, RawSample, Source, SourceConfigBase
from vqclip.data.sources.captions import CaptionFiles
from vqclip.data.sources.class_folder import CLASSNAMES
from vqclip.data.sources.paths import find_shards
from vqclip.data.tars.members import KINDS, MemberRules
from vqclip.data.tars.open import TarSet, describe_left_out
from vqclip.data.tars.reader import TarReader
from vqclip.errors import DataError

__all__ = ["CaptionShards", "CaptionShardsConfig", "Endings", "OpensTars", "TarSource", "require_members"]

Endings = Annotated[
    tuple[Annotated[str, Field(pattern=r"^\.?[^/\s]+$")], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]
"""Endings of the names of members; one may be written alone."""


class CaptionShardsConfig(SourceConfigBase):
    """Tars whose samples are an image (jpg, png, webp, ...) with a caption (txt or json) of the same name."""

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"shards": (".tar", ".tar.gz", ".tgz")}

    kind: Literal["shards"] = "shards"
    """Caption shards."""
    path: str | tuple[str, ...]
    """A folder of tars, a tar, a pattern such as train/{00000..00041}.tar or train/*.tar, or a list of these. URLs
    (file, s3, gs, az, hf, http, https) work the same way; with http and https every shard must be named, or written
    with braces."""
    captions: Literal["txt", "txt_lines", "json"] = "txt"
    """txt: the whole .txt is the caption. txt_lines: every line is one. json: values of `json_keys` in the .json."""
    json_keys: tuple[str, ...] = ("caption",)
    """Keys of the .json with a caption or a list of captions."""
    image_member: Endings = ()
    """Ending of the members with the images, if it is another one (`image.jpg` for `0.image.jpg`), or if samples have
    several images. Of several endings, the first that a sample has."""
    caption_member: Endings = ()
    """Ending of the members with the captions, such as `caption.txt`; with captions json that of the .json."""
    bad_shards: Literal["refuse", "leave_out"] = "refuse"
    """leave_out: shards that are missing, cut short or damaged are left out, and counted in a message."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of shards at URLs."""

    @model_validator(mode="after")
    def _has_something_to_read(self) -> CaptionShardsConfig:
        if not self.path:
            raise ValueError("path: got nothing; expected a folder, a tar or a pattern")
        if self.captions == "json" and not self.json_keys:
            raise ValueError("json_keys: got an empty list; expected keys of the .json that hold captions")
        return self

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return False

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there are tars without a file of class names."""
        return CLASSNAMES not in content.files and any(map(is_tar, content.files))

    def tars(self) -> Sequence[Shard]:
        """Return the tars.

        Raises:
            DataError: there are none, or one is missing.
        """
        paths = [self.path] if isinstance(self.path, str) else self.path
        return find_shards(paths, self.remote, allow_missing=self.bad_shards == "leave_out")

    def shards(self) -> Sequence[Part]:
        """See `SourceConfigBase.shards`."""
        return self.tar_set().parts()

    def in_chunks(self, chunk: int) -> OpensSource:
        """See `SourceConfigBase.in_chunks`."""
        return OpensTars(lambda: self.tar_set(chunk), lambda tars: CaptionShards(self, tars))

    def build(self, cache: Path | None = None) -> CaptionShards:
        """Open the shards, after indexing those without an index."""
        return CaptionShards(self, self.tar_set().open(cache))

    def build_part(self, shards: Sequence[Shard]) -> CaptionShards:
        """Open some of the shards, for processes that share a data set; none of their samples may be usable."""
        return CaptionShards(self, self.tar_set(shards=shards).open(), is_part=True)

    def tar_set(self, chunk: int | None = None, shards: Sequence[Shard] | None = None) -> TarSet:
        """Return the tars, or some of them, to be opened, for an order with chunks of ``chunk`` samples."""
        rules = MemberRules(self.image_member, self.caption_member, "json" if self.captions == "json" else "txt")
        shards = self.tars() if shards is None else shards
        return TarSet(shards, self.remote, rules, self.bad_shards == "leave_out", chunk)


@dataclass(frozen=True)
class OpensTars:
    """Prepares and opens a source of tars; see `OpensSource`."""

    tars: Callable[[], TarSet]
    """Finds the tars."""
    make: Callable[[TarReader], Source]
    """Makes the source."""

    def shards(self) -> Sequence[Part]:
        """See `SourceConfigBase.shards`."""
        return self.tars().parts()

    def build(self, cache: Path | None = None) -> Source:
        """See `SourceConfigBase.build`."""
        return self.make(self.tars().open(cache))


class TarSource:
    """Base of sources that read tars: their names, keys, shards and notes come from a reader.

    Args:
        tars: reads the shards.
    """

    def __init__(self, tars: TarReader):
        self.tars = tars
        """Reader of the shards."""
        self.notes = describe_left_out(tars.index)

    def __len__(self) -> int:
        return len(self.tars)

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        return self.tars.name(index)

    def key(self, index: int) -> str:
        """Return the sample's name in its shard; see `ShardedSource.key`."""
        return self.tars.key(index)

    def place(self, index: int) -> str:
        """Return shard and sample; see `vqclip.data.prepare.ImageSource.place`."""
        return self.tars.place(index)

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """See `ShardedSource.shards`."""
        return self.tars.shards


class CaptionShards(TarSource):
    """A `Source` of images with captions.

    Args:
        config: the place of the captions.
        tars: reads the shards.
        is_part: whether these are some of the shards, which need no usable sample.

    Raises:
        DataError: no sample with an image and a caption.
    """

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def __init__(self, config: CaptionShardsConfig, tars: TarReader, is_part: bool = False):
        super().__init__(tars)
        self.config = config
        self._captions = CaptionFiles(config.captions, config.json_keys)
        where = ", ".join(map(display_url, [config.path] if isinstance(config.path, str) else config.path))
        if not is_part:
            require_members(tars, self._captions.kind, where)

    def read(self, index: int) -> RawSample:
        """Return image and captions of one sample; see `Source.read`."""
        text = self.tars.text(index, self._captions.kind, self.tars.read(index, self._captions.kind))
        return RawSample(self.tars.read(index, "image"), self._captions.parse(text, self.name(index)))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        settings = {"sha256": self.tars.sha256, **self._captions.fingerprint}
        if self.config.image_member or self.config.caption_member:
            settings["members"] = self.tars.rules.to_json()
        return {"kind": "shards", "samples": len(self), **settings}


def require_members(tars: TarReader, kind: str, path: object) -> None:
    """Raise DataError if no sample has an image and a member of a kind: then the layout is wrong, not a sample."""
    facts = tars.index.facts
    if facts.complete[KINDS.index(kind)]:
        return
    if facts.damaged and not len(tars):
        raise DataError(f"{path}: all shards are missing or damaged; {describe_left_out(tars.index)[0]}")
    found = ", ".join(f".{name} ({count})" for name, count in sorted(facts.endings.items(), key=lambda e: -e[1])[:8])
    if not found:
        raise DataError(f"{path}: every tar is empty; expected samples, such as 000000000.jpg and 000000000.txt")
    hint = " Set image_member and caption_member to the endings of the images and captions."
    if facts.ambiguous:
        hint = f" {describe_left_out(tars.index)[-1]}."
    elif tars.count("image") and kind == "txt" and tars.count("cls"):
        hint = " The samples have a .cls: is it a source of kind: classes?"
    elif tars.count("image") and kind == "txt" and facts.complete[KINDS.index("json")]:
        hint = " Captions in the .json? Set captions: json and json_keys."
    elif tars.count("image") and tars.count(kind) and tars.index.keys is not None:
        image, other = (_first_with(tars, each) for each in ("image", kind))
        stem = image.rpartition(".")[0]
        if not stem or stem != other.rpartition(".")[0]:  # 0.input.png and 0.output.txt: the hint above
            hint = (
                " Members of one sample have the same path but for the ending, as a/0.jpg and a/0.txt; here are, "
                f"without endings, an image {image!r} and a {kind} {other!r}: pack them with equal names."
            )
    what = "label (.cls)" if kind == "cls" else f"caption (.{kind})"
    raise DataError(
        f"{path}: none of the {len(tars)} samples has an image (.jpg, .png, .webp, ...) and a {what} of the same name; "
        f"the members end in {found}.{hint}"
    )


def _first_with(tars: TarReader, kind: str) -> str:
    """Return the name of the first sample that has a member of a kind; there must be one."""
    has = (sample for sample in range(len(tars)) if tars.index.member(sample, KINDS.index(kind))[0] >= 0)
    return tars.key(next(has))
