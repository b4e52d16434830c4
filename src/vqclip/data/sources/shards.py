"""Tars: caption shards in img2dataset's layout, labelled shards in clip_benchmark's, and the drawn data set."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from vqclip.data.decode import OTHER_ENDINGS
from vqclip.data.remote.files import Shard, is_tar
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import beneath, display_url, local_path, protocol_of
from vqclip.data.sources.base import MAX_BYTES, Place, Places, Preparation, RawSample, SourceConfigBase, name_sample
from vqclip.data.sources.class_names import (
    CLASSNAMES,
    TEMPLATES,
    checksum_prompts,
    fill_templates,
    read_names,
    read_templates,
    read_text,
)
from vqclip.data.sources.columns import CaptionFiles, Weighted, decode_text, describe_lines
from vqclip.data.sources.paths import describe_splits, find_shards
from vqclip.data.tars.members import KINDS, MemberRules
from vqclip.data.tars.open import TarSet, describe_left_out
from vqclip.data.tars.reader import TarReader
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home
from vqclip.scenes import ScenesConfig, make_scenes

_MAX_COUNT = 100_000
"""Shards of a class folder that are listed in memory."""
_SAMPLED = 20
"""First captions that are read to find out whether they have several lines."""
_Endings = Annotated[
    tuple[Annotated[str, Field(pattern=r"^\.?[^/\s]+$")], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]
"""Endings of the names of members; one may be written alone."""


class TarConfig(SourceConfigBase):
    """Settings that all kinds of tars have in common; a kind implements `tars`, `rules` and `open`."""

    image_member: _Endings = ()
    """Ending of the members with the images, if it is another one (`image.jpg` for `0.image.jpg`), or if samples have
    several images. Of several endings, the first that a sample has."""
    bad_shards: Literal["refuse", "leave_out"] = "refuse"
    """leave_out: shards that are missing, cut short or damaged are left out, and counted in a message."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of shards at URLs."""

    def tars(self) -> Sequence[Shard]:
        """Return the tars.

        Raises:
            DataError: there are none, or one is missing.
        """
        raise NotImplementedError

    @property
    def rules(self) -> MemberRules:
        """Rules by which members are grouped."""
        return MemberRules(self.image_member)

    def open(self, tars: TarReader) -> TarSource:
        """Return the source of some tars.

        Raises:
            DataError: other files that it needs are missing or wrong.
        """
        raise NotImplementedError

    def tar_set(self, shards: Sequence[Shard] | None = None) -> TarSet:
        """Return the tars, or some of them, to be opened."""
        shards = self.tars() if shards is None else shards
        return TarSet(shards, self.remote, self.rules, self.bad_shards == "leave_out", self._chunk)

    def preparations(self) -> Sequence[Preparation]:
        """See `SourceConfigBase.preparations`."""
        return self.tar_set().preparations()

    def build(self) -> TarSource:
        """Open the shards, after indexing those without an index; see `SourceConfigBase.build`."""
        tars = (found := self.tar_set()).open()
        more = f" and {len(found.shards) - 1} more" if found.shards[1:] else ""
        _require_members(tars, "cls" if self.has_classes else self.rules.text_kind, f"{found.shards[0]}{more}")
        source = self.open(tars)
        source.notes += describe_splits(found.shards)
        return source

    def build_part(self, shards: Sequence[Shard]) -> TarSource:
        """Open some of the shards, for processes that share a data set; none of their samples may be usable."""
        return self.open(self.tar_set(shards).open())


class TarSource:
    """A `Source` of the samples in tars.

    Args:
        config: settings.
        tars: reads the shards.
        captions: the members with the captions; None: the captions are prompts.
        classnames: names of the classes, whose numbers are in the members .cls; empty without classes.
        templates: prompts with ``{c}`` for the class name.
    """

    def __init__(
        self,
        config: SourceConfigBase,
        tars: TarReader,
        captions: CaptionFiles | None,
        classnames: tuple[str, ...] = (),
        templates: tuple[str, ...] = (),
    ):
        self.config, self.classnames, self.templates = config, classnames, templates
        self.tars = tars
        """Reader of the shards."""
        self.notes = describe_left_out(tars.index)
        self._captions, self._prompts = captions, fill_templates(templates, classnames)

    def __len__(self) -> int:
        return len(self.tars)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one sample; see `Source.read`."""
        tars, label = self.tars, -1
        captions: tuple[str, ...] = ()
        keys: tuple[int, ...] = ()
        image = tars.read(index, "image")
        if self.classnames:
            data = tars.read(index, "cls")
            with name_sample(self.name(index)):
                label = self._parse_label(decode_text(data, "cls"))
            captions = self._prompts[label]
        if self._captions is not None:
            data = tars.read(index, self._captions.kind)
            with name_sample(self.name(index)):
                captions, keys = self._captions.parse(data)
        return RawSample(image, captions, label, keys if self.config.caption_weights else ())

    def _parse_label(self, text: str) -> int:
        label, count = int(text) if text.isascii() and text.isdigit() else -1, len(self.classnames)
        if not 0 <= label < count:
            what = f".cls contains {text[:20]!r}; expected a class number, 0 to {count - 1}"
            if label == count:
                what += f"; if they are 1 to {count}, a blank line before the names in {CLASSNAMES}"
            raise DataError(what, "class number")
        return label

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        return self.tars.name(index)

    def key(self, index: int) -> str:
        """Return the sample's name in its shard; see `ShardedSource.key`."""
        return self.tars.key(index)

    def place(self, index: int) -> str:
        """Return shard and sample; see `ShardedSource.place`."""
        return self.tars.place(index)

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """See `ShardedSource.shards`."""
        return self.tars.shards

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        captions, rules, content = self._captions, self.tars.rules.to_json(), self.tars.index.facts.content
        facts = {"prompts_sha256": checksum_prompts(self._prompts)} if captions is None else captions.fingerprint
        members = {"members": rules} if rules["image"] or rules["text"] else {}
        return {"kind": self.config.kind, "samples": len(self), "sha256": content, **facts, **members}


class CaptionShardsConfig(TarConfig):
    """Tars whose samples are an image (jpg, png, webp, ...) with a caption (txt or json) of the same name."""

    kind: Literal["shards"] = "shards"
    """Caption shards."""
    path: Places
    """A folder of tars, a tar, a pattern such as train/{00000..00041}.tar or train/*.tar, or a list of these. URLs
    (file, s3, gs, az, hf, http, https) work the same way; with http and https every shard must be named, or written
    with braces."""
    captions: Literal["txt", "txt_lines", "json"] = "txt"
    """txt: the whole .txt is the caption. txt_lines: every line is one. json: values of `json_keys` in the .json."""
    json_keys: Annotated[tuple[str, ...], Field(min_length=1)] | Weighted = ("caption",)
    """Keys of the .json with a caption or a list of captions; with weights, such as {short: 0.7, long: 0.3}, one is
    drawn by them, and then a caption of it."""
    caption_member: _Endings = ()
    """Ending of the members with the captions, such as `caption.txt`; with captions json that of the .json."""

    @model_validator(mode="after")
    def _weights_are_of_json(self) -> CaptionShardsConfig:
        if isinstance(self.json_keys, dict) and self.captions != "json":
            raise ValueError(f"json_keys: got weights with captions {self.captions!r}; expected captions: json")
        return self

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return False

    @property
    def rules(self) -> MemberRules:
        """See `TarConfig.rules`."""
        return MemberRules(self.image_member, self.caption_member, "json" if self.captions == "json" else "txt")

    def tars(self) -> Sequence[Shard]:
        """See `TarConfig.tars`."""
        return find_shards(self.path, self.remote, allow_missing=self.bad_shards == "leave_out")

    def open(self, tars: TarReader) -> TarSource:
        """See `TarConfig.open`."""
        source = TarSource(self, tars, CaptionFiles(self.captions, tuple(self.json_keys)))
        if self.captions == "txt" and tars.index.keys is not None and not tars.is_remote:
            places = [tars.index.member(row, KINDS.index("txt")) for row in range(min(len(tars), _SAMPLED))]
            usable = [row for row, (at, size) in enumerate(places) if at >= 0 and size <= MAX_BYTES["txt"]]
            source.notes += describe_lines(tars.read(row, "txt") for row in usable)
        return source


class ClassShardsConfig(TarConfig):
    """A folder with `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar` of images and .cls.

    clip_benchmark's webdataset export writes this layout. `{c}` in a template stands for the class name, and .cls
    contains a line number of classnames.txt, from 0.
    """

    kind: Literal["classes"] = "classes"
    """Labelled shards."""
    path: Place
    """The folder, or its URL. With http and https, `nshards.txt` beside the tars gives their number."""
    split: str | None = None
    """Subfolder of the split; "" if the tars are beside `classnames.txt`. null: train in `data.sources`, test in
    `evaluation`, elsewhere the only split."""

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return True

    def tars(self) -> Sequence[Shard]:
        """See `TarConfig.tars`: ``0.tar``, ``1.tar``, ... if the protocol cannot list folders.

        Raises:
            ConfigError: no split is named, and there are several, or it is a URL.
        """
        folder = self._file(self._find_split())
        if protocol_of(folder) not in ("http", "https"):
            return find_shards([folder], self.remote)
        file, expected = beneath(folder, "nshards.txt"), f"the number of shards, at most {_MAX_COUNT}"
        text = read_text(file, expected, self.remote, 64).strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_COUNT):
            raise DataError(f"{display_url(file)}: got {text[:20]!r}; expected {expected}")
        return find_shards([beneath(folder, f"{number}.tar") for number in range(int(text))], self.remote)

    def open(self, tars: TarReader) -> TarSource:
        """See `TarConfig.open`."""
        config = self.model_copy(update={"split": self._find_split()})
        names = read_names(self._file(CLASSNAMES), self.remote)
        source = TarSource(config, tars, None, names, read_templates(self._file(TEMPLATES), self.remote))
        if unnamed := [f"class {number}" for number, name in enumerate(names) if not name]:
            source.notes += (f"{CLASSNAMES}: no name for {', '.join(unnamed[:5])}",)
        return source

    def _file(self, name: str) -> str:
        """Return the path or URL of a file or folder in the folder."""
        local = local_path(self.path)
        return beneath(self.path, name) if local is None else str(expand_home(local).absolute() / name)

    def _find_split(self) -> str:
        """Return the split to use: the given one, otherwise the only one in the folder.

        With several splits the user must choose: training on the test split, or testing on the train split, must be
        intended.
        """
        if (local := local_path(self.path)) is None:
            if self.split is None:
                raise ConfigError(f"split: missing; expected the name of a split of {display_url(self.path)}")
            return self.split
        folder = expand_home(local).absolute()
        if not folder.is_dir():
            wanted = f"{CLASSNAMES} and {self.split or 'SPLIT'}/*.tar"
            raise DataError(f"{folder}: no such folder; expected one with {wanted}")
        places = ("*", "*/*", *([f"{glob.escape(self.split)}/*"] if self.split else []))
        tars = (file for place in places for file in folder.glob(place) if is_tar(file.name))
        splits = sorted({tar.parent.relative_to(folder).as_posix().removeprefix(".") for tar in tars})
        shown = ", ".join(map(repr, splits)) or "none"
        if splits in ([], [""]) and not (folder / CLASSNAMES).exists() and (folder.parent / CLASSNAMES).exists():
            raise DataError(f"{folder}: is a split itself; expected the path {folder.parent}, and split: {folder.name}")
        if self.split is None and len(splits) > 1:
            raise ConfigError(f"split: missing; expected one of those in {folder}: {shown}")
        if self.split not in (None, *splits) or not splits:
            raise DataError(f"{folder}: has no split {self.split or 'with tars'!r}; splits with tars: {shown}")
        return splits[0] if self.split is None else self.split


def _require_members(tars: TarReader, kind: str, path: object) -> None:
    """Raise DataError if no sample has an image and a member of a kind: then the layout is wrong, not a sample."""
    facts = tars.index.facts
    if facts.complete[KINDS.index(kind)]:
        return
    if facts.damaged and not len(tars):
        raise DataError(f"{path}: all shards are missing or damaged; {describe_left_out(tars.index)[0]}")
    found = ", ".join(f".{name} ({count})" for name, count in sorted(facts.endings.items(), key=lambda e: -e[1])[:8])
    if not found:
        raise DataError(f"{path}: every tar is empty; expected samples, such as 000000000.jpg and 000000000.txt")
    counts, left_out = dict(zip(KINDS, facts.members, strict=True)), "".join(describe_left_out(tars.index)[-1:])
    if facts.ambiguous:
        hint = f"{left_out}."
    elif not counts["image"] and {*facts.ignored} & {*OTHER_ENDINGS}:
        hint = f"{left_out}: convert them to JPEG, PNG or WebP."
    elif counts["image"] and kind == "txt" and counts["cls"]:
        hint = "The samples have a .cls: is it a source of kind: classes?"
    elif counts["image"] and kind == "txt" and facts.complete[KINDS.index("json")]:
        hint = "Captions in the .json? Set captions: json and json_keys."
    elif kind == "cls":
        hint = "Labels are numbers in members .cls; image_member is the ending of the images."
    else:
        hint = (
            "Set image_member and caption_member to the endings of the images and captions, or unpack a tar of classes "
            "or tables, and name its folder."
        )
    if any(is_tar(f".{name}") for name in facts.endings):
        hint = "It contains tars: unpack it, and name their folder."
    elif counts["image"] and counts[kind] and tars.index.keys is not None:
        image, other = (
            next(
                tars.key(sample) for sample in range(len(tars)) if tars.index.member(sample, KINDS.index(each))[0] >= 0
            )
            for each in ("image", kind)
        )
        stem = image.rpartition(".")[0]
        if not stem or stem != other.rpartition(".")[0]:  # 0.input.png and 0.output.txt: the hint above
            cure = "put them into one tar" if image == other else "give them equal names, or unpack it"
            hint = (
                "Members of one sample have the same path but for the ending, as a/0.jpg and a/0.txt; here, without "
                f"endings, an image {image!r} and a {kind} {other!r}: {cure}."
            )
    what = "label (.cls)" if kind == "cls" else f"caption (.{kind})"
    raise DataError(
        f"{path}: none of the {len(tars)} samples has an image (.jpg, .png, .webp, ...) and a {what} of the same name; "
        f"the members end in {found}. {hint}"
    )


class ScenesSourceConfig(SourceConfigBase):
    """Drawn coloured shapes with captions; drawn on first use, in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    """The drawn data set."""
    split: Literal["train", "val", "test", "heldout"] | None = None
    """train and val have captions (of trained and of held-out combinations), test and heldout have classes. null: val
    for retrieval, test for zero-shot classification, otherwise train."""
    drawing: ScenesConfig = ScenesConfig()
    """The drawing; evaluation may use another one, since all drawings hold out the same combinations."""

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return self.split in ("test", "heldout")

    def preparations(self) -> Sequence[Preparation]:
        """See `SourceConfigBase.preparations`; missing tars are drawn."""
        return self._shards_config().preparations()

    def build(self) -> TarSource:
        """Open the shards, after drawing and indexing them if necessary."""
        return self._shards_config().build()

    def _shards_config(self) -> CaptionShardsConfig | ClassShardsConfig:
        split = self.split or "train"
        folder = make_scenes(config=self.drawing) / split
        if split in ("train", "val"):
            return CaptionShardsConfig(path=str(folder))
        return ClassShardsConfig(path=folder, split="test")
