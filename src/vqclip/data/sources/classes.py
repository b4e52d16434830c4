"""Labelled shards in clip_benchmark's layout, whose captions are prompts with the class name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vqclip.data.remote import RemoteConfig
from vqclip.data.shard import Part, Shard
from vqclip.data.sources.base import FolderContent, OpensSource, Place, RawSample, SourceConfigBase
from vqclip.data.sources.captions import Prompts
from vqclip.data.sources.class_folder import CLASSNAMES, choose_split, open_folder, read_lines, read_templates
from vqclip.data.sources.shards import Endings, OpensTars, TarSource, require_members
from vqclip.data.tars.members import MemberRules
from vqclip.data.tars.open import TarSet
from vqclip.data.tars.reader import TarReader

__all__ = ["ClassShards", "ClassShardsConfig"]


class ClassShardsConfig(SourceConfigBase):
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
    image_member: Endings = ()
    """Ending of the members with the images, if samples have several images or others than usual; of several endings,
    the first that a sample has."""
    bad_shards: Literal["refuse", "leave_out"] = "refuse"
    """leave_out: shards that are missing, cut short or damaged are left out, and counted in a message."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of shards at URLs."""

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return True

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there is a file of class names."""
        return CLASSNAMES in content.files

    def tars(self) -> Sequence[Shard]:
        """Return the tars.

        Raises:
            DataError: there are none.
            ConfigError: there are several splits, and none is named.
        """
        return open_folder(self.path, self.remote).shards(choose_split(self.path, self.split))

    def shards(self) -> Sequence[Part]:
        """See `SourceConfigBase.shards`."""
        return self.tar_set().parts()

    def in_chunks(self, chunk: int) -> OpensSource:
        """See `SourceConfigBase.in_chunks`."""
        return OpensTars(lambda: self.tar_set(chunk), lambda tars: ClassShards(self, tars))

    def build(self, cache: Path | None = None) -> ClassShards:
        """Open the shards, after indexing those without an index."""
        return ClassShards(self, self.tar_set().open(cache))

    def build_part(self, shards: Sequence[Shard]) -> ClassShards:
        """Open some of the shards, for processes that share a data set; none of their samples may be usable."""
        return ClassShards(self, self.tar_set(shards=shards).open(), is_part=True)

    def tar_set(self, chunk: int | None = None, shards: Sequence[Shard] | None = None) -> TarSet:
        """Return the tars, or some of them, to be opened, for an order with chunks of ``chunk`` samples."""
        shards = self.tars() if shards is None else shards
        rules = MemberRules(self.image_member)
        return TarSet(shards, self.remote, rules, self.bad_shards == "leave_out", chunk)


class ClassShards(TarSource):
    """A `Source` of labelled images; every prompt with the class name is a caption.

    Args:
        config: the folder.
        tars: reads the shards.
        is_part: whether these are some of the shards, which need no usable sample.

    Raises:
        DataError: no sample with an image and a label, or class names or templates missing.
        ConfigError: there are several splits, and none is named.
    """

    def __init__(self, config: ClassShardsConfig, tars: TarReader, is_part: bool = False):
        super().__init__(tars)
        self.config = config.model_copy(update={"split": choose_split(config.path, config.split)})
        folder = open_folder(config.path, config.remote)
        if not is_part:
            require_members(tars, "cls", folder.name(self.config.split or ""))
        self.classnames = read_lines(folder, CLASSNAMES, "one class name a line")
        unnamed = [number for number, name in enumerate(self.classnames) if not name]
        if unnamed:
            self.notes = (
                *self.notes,
                f"{CLASSNAMES}: no name for {', '.join(f'class {each}' for each in unnamed[:5])}",
            )
        self.templates = read_templates(folder)
        self._prompts = Prompts(self.templates, self.classnames)

    def read(self, index: int) -> RawSample:
        """Return image, prompts and label of one sample; see `Source.read`."""
        text = self.tars.text(index, "cls", self.tars.read(index, "cls"))
        label = int(text) if text.isascii() and text.isdigit() else -1
        prompts = self._prompts.of(label, f"{self.name(index)}: .cls contains {text[:20]!r}")
        return RawSample(self.tars.read(index, "image"), prompts, label)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        facts = {"sha256": self.tars.sha256, "prompts_sha256": self._prompts.sha256}
        members = {"members": self.tars.rules.to_json()} if self.config.image_member else {}
        return {"kind": "classes", "samples": len(self), **facts, **members}
