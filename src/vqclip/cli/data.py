"""``vqclip data``: draw the scenes data set; pack, check, index and show data of any kind; store features.

Each command imports what it needs: several processes of ``vqclip data index`` start without the training code.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vqclip.cli.options import (
    SOURCE,
    SOURCE_KEYS,
    BadFraction,
    Command,
    LocalPath,
    OnRay,
    OutputFile,
    Page,
    Source,
    Text,
    Workers,
)
from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.io.atomic import write_text
from vqclip.io.files import expand_home
from vqclip.runlog.console import fit_lines, print_output

if TYPE_CHECKING:
    from vqclip.data import CaptionShardsConfig, ClassShardsConfig

_MIN_SIDE, _IMAGE_SIZE, _CONTEXT = 32, 224, 77
"""Without a configuration: side of images below which `check` warns; side of images and tokens of texts in `show`."""
_MORE_WITH_CONFIG = "keys of SOURCE, such as kind=csv; with --config those of the configuration"

ContextLength = Annotated[int, Field(ge=3, le=4096)]
"""Tokens of a caption; the same limit as in `vqclip.towers.vocabulary`."""


class _DataCommand(
    Command, words=("source",), reads=SOURCE_KEYS, failure=1, after_interrupt="run the same command again"
):
    """A command on one source."""

    def require_none_of(self, *keys: str) -> None:
        """Refuse options that --config has its own of."""
        for key in keys:
            if getattr(self, key) is not None:
                option = f"--{key.replace('_', '-')}"
                raise ConfigError(f"{option}: got it beside --config, which has its own; expected one of them")


class Draw(_DataCommand, words=(), reads="sizes and seed, such as image_size=224 train=500 seed=1"):
    """Draw the scenes data set.

    Splits: train, val: captioned; test, heldout: labelled, for zero-shot.

    Examples:
      vqclip data draw --out scenes train=500 image_size=128
    """

    out: LocalPath | None = None
    """Folder to draw into; $VQCLIP_CACHE or ~/.cache/vqclip without it."""

    def run(self) -> None:
        """Draw the scenes data set."""
        from vqclip.scenes.make import ScenesConfig, make_scenes

        folder = make_scenes(self.out, load_config(ScenesConfig, None, self.keys))
        for split in ("train", "val", "test", "heldout"):
            print(f"{split:8} {folder / split}")


class Pack(_DataCommand, words=("source", "out")):
    """Write data of any kind as WebDataset shards.

    Captioned images become OUT/00000.tar, ... as img2dataset writes them; labelled ones OUT/SPLIT/0.tar, ... beside the
    class names and prompts, as clip_benchmark does. Images keep their bytes, and samples their order. Run the same
    command again to continue after a stop; machines that share OUT run it at the same time.

    Examples:
      vqclip data pack photos.csv shards/photos
      vqclip data pack /datasets/flowers shards/flowers --split train --workers 8
      vqclip data pack annotations.json shards/coco --workers 8    # on each of four machines
    """

    source: Source
    out: LocalPath
    """Folder to write to: a new one, or one that was begun."""
    split: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "train"
    """Folder of the shards of labelled data, such as train."""
    shard_size: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Samples in a shard, unusable ones included; sources that are read in pieces have a shard for each."""
    workers: Workers = 1
    """Processes that read, verify and write; any number writes the same bytes."""
    bad_fraction: BadFraction = 0.01
    """Largest share of samples that are left out, named in bad_samples.jsonl."""
    max_pixels: Annotated[int, Field(ge=1)] = 50_000_000
    """Larger images cannot be used."""

    def run(self) -> None:
        """Pack the source, and print where it is and how it is read."""
        from vqclip.data import FolderConfig, open_source, parse_source
        from vqclip.data.sources.packed import PackedConfig
        from vqclip.data_tools.pack import pack

        config, out = parse_source(self.source, self.keys), expand_home(self.out).absolute()
        if isinstance(config, FolderConfig) and out.resolve().is_relative_to(config.listing.resolve()):
            raise ConfigError(f"OUT: {out} is inside SOURCE, whose folders are data; expected a folder elsewhere")
        data = config if isinstance(config, PackedConfig) and config.image_files() is None else open_source(config)
        settings = self.model_dump(include={"split", "shard_size", "workers", "bad_fraction", "max_pixels"})
        print(fit_lines(pack(data, out, **settings).describe(out)), flush=True)


class Check(_DataCommand):
    """Read every sample, and report what is bad, duplicated or unusual.

    The exit status is 1 if more samples than --bad-fraction cannot be used; training would stop there too. Warnings
    (duplicates, captions that are cut, classes without images, unusual images) do not change it.

    Examples:
      vqclip data check photos.csv --context-length 77 --workers 8
      vqclip data check data/captions/train --config configs/captions.yaml --against data/captions/val
    """

    source: Source
    config: LocalPath | None = None
    """Training configuration: its vocabulary, context length, image size and largest image."""
    context_length: ContextLength | None = None
    """Tokens of open_clip's vocabulary after which captions are cut, instead of --config."""
    against: tuple[Text, ...] = ()
    """Other data, such as those of an evaluation, whose images should not be in SOURCE; its keys may follow."""
    workers: Workers = 1
    """Processes that read and decode."""
    bad_fraction: BadFraction = 0.01
    """Largest share of bad samples for exit status 0."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Larger images are bad samples; 50000000 without it and --config."""
    min_side: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Images with a shorter side give a warning; without it 32, or the image size (of any shape: a patch) of
    --config."""
    examples: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Samples named for each kind on the screen."""
    json_: OutputFile | None = None
    """Write the report with all names to this file."""

    def run(self) -> int:
        """Check the source and print the report; return 1 if too many samples are bad."""
        from vqclip.data import open_source, parse_source
        from vqclip.data.batch import allowed_bad
        from vqclip.data.decode import MAX_PIXELS
        from vqclip.data.sources.parquet import ParquetConfig
        from vqclip.data_tools.check import CheckOptions, Finding, check_source, format_report
        from vqclip.data_tools.show import ModelInputs
        from vqclip.towers.vocabulary import BPE, MAX_CONTEXT, Vocabulary

        context_length = self.context_length
        vocabulary: Vocabulary = BPE(context_length or MAX_CONTEXT)
        min_side, max_pixels = _MIN_SIDE, MAX_PIXELS
        if self.config is not None:
            self.require_none_of("context_length")
            config, size, vocabulary = ModelInputs.load(self.config)
            min_side = size if isinstance(size, int) else size.patch_size
            context_length, max_pixels = vocabulary.context_length, config.data.max_pixels
        limits = CheckOptions(
            tokenize=vocabulary.with_lengths,
            context_length=context_length,
            max_pixels=self.max_pixels or max_pixels,
            min_side=self.min_side or min_side,
            workers=self.workers,
        )
        given = parse_source(self.source, self.keys)
        if hasattr(given, "bad_shards"):  # the damaged ones are named in the report
            given = given.model_copy(update={"bad_shards": "leave_out"})
        problems: dict[str, str] = {}
        if isinstance(given, ParquetConfig):
            given, problems = given.without_damaged()
        source = open_source(given)
        against = None if not self.against else open_source(parse_source(self.against[0], self.against[1:]))
        report = check_source(source, limits, against)
        problems |= source.tars.index.facts.damaged if hasattr(source, "tars") else {}
        damaged = list(itertools.starmap(Finding, problems.items()))
        if damaged:
            report.bad = {"damaged shard": damaged, **report.bad}
        print_output(format_report(report, self.examples))
        if self.json_ is not None:
            self.json_.absolute().parent.mkdir(parents=True, exist_ok=True)
            write_text(self.json_, json.dumps(report.to_json(), indent=1, ensure_ascii=True) + "\n")
        bad, allowed = report.bad_samples, allowed_bad(self.bad_fraction, report.samples)
        if not damaged and bad <= allowed:
            return 0
        what = f"{len(damaged)} damaged shards" if damaged else f"{bad:,} of {report.samples:,} samples are bad"
        print_output(f"\nnot usable as it is: {what}; --bad-fraction allows {allowed:,} bad samples")
        return 1


class Index(_DataCommand):
    """Make the index of tars that training needs.

    It reads every shard once and stores none. Any number of processes and machines may run the same command at once:
    they share the work. Run it again after a stop, or when shards have changed: the others are not read again.

    Examples:
      vqclip data index s3://bucket/shards
      vqclip data index '/datasets/web/{00000..00999}.tar' --workers 8
      vqclip data index 'https://data.example.org/{00000..00999}.tar' --workers 16
    """

    source: Text = Field(description=f"{SOURCE}: tars")
    chunk: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Samples of a chunk; data.order.chunk must be a multiple of it."""
    workers: Annotated[int, Field(ge=1, le=512)] = 4
    """Shards that are read at a time; on fast disks start several processes instead."""

    def run(self) -> None:
        """Make the index, and print where it is and how training finds it."""
        from vqclip.data_tools.index import index_shards

        tars = parse_tars(self.source, self.keys).tar_set()
        print_output(index_shards(tars, self.chunk, self.workers))


class Features(OnRay, reads="changes to the file", failure=1, after_interrupt="run the same command again"):
    """Store the features of a run's frozen towers before it starts.

    The run finds them and starts at once. With --engine ray they are computed on a cluster, whose machines share the
    folder data.feature_cache.folder and have the kind of device that the run will have.

    Examples:
      vqclip data features --config configs/pretrained.yaml
      vqclip data features --config run.yaml data.feature_cache.folder=/shared/features --engine ray
    """

    config: LocalPath
    """Configuration of the run."""

    def run(self) -> None:
        """Store the features of a run's frozen towers."""
        from vqclip.train.fill_features import fill_features, fill_features_on_ray
        from vqclip.train.tasks.kinds import load_task_config

        ray = self.cluster
        config = load_task_config(self.config, self.keys)
        if ray is None:
            fill_features(config)
        else:
            print(fill_features_on_ray(config, ray), flush=True)


class Show(_DataCommand, reads=_MORE_WITH_CONFIG):
    """Make a contact sheet of what the model sees.

    Images are decoded, cropped, augmented and resized as training does it, in its order; captions are shown as their
    tokens, and what is cut in red. With --config, data, transform, image size, vocabulary and seed are those of a
    training configuration, and key=value changes the configuration; without it they are those of SOURCE and the
    defaults.

    Examples:
      vqclip data show photos.csv --out sheet.html
      vqclip data show --config configs/captions.yaml --out sheet.html --views 4 data.transform.flip=0.5
    """

    source: Text | None = Field(None, description=SOURCE)
    out: Page
    """HTML page to write."""
    config: LocalPath | None = None
    """Training configuration."""
    count: Annotated[int, Field(ge=1, le=1000)] = 24
    """Samples."""
    views: Annotated[int, Field(ge=1, le=32)] = 1
    """Views of each image side by side, those of as many epochs."""
    epoch: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Epoch whose first samples are shown."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of order and augmentation; without it 0, or run.seed of the configuration."""
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Side of the images in pixels, without --config; 224 without both."""
    context_length: ContextLength | None = None
    """Tokens of a caption, without --config; 77 without both."""

    def run(self) -> None:
        """Write a contact sheet of what the model sees."""
        from vqclip.data import DataConfig, parse_source
        from vqclip.data_tools.show import ModelInputs, render_sheet, training_tiles
        from vqclip.towers.vocabulary import BPE

        if (self.config is None) == (self.source is None):
            raise ConfigError("got neither SOURCE nor --config, or both; expected one of them")
        if self.config is not None:
            self.require_none_of("image_size", "context_length")
            config, size, vocabulary = ModelInputs.load(self.config, self.keys)
            data, batch, default, name = config.data, config.train.batch_size, config.run.seed, str(self.config)
        else:
            name, batch, default = str(self.source), 1, 0
            data = DataConfig(sources=(parse_source(name, self.keys),))
            size, vocabulary = self.image_size or _IMAGE_SIZE, BPE(self.context_length or _CONTEXT)
        seed = default if self.seed is None else self.seed
        built = data.model_copy(update={"workers": 0}).build(size, vocabulary.with_lengths, batch, seed)
        pixels = f"{size} px" if isinstance(size, int) else f"at most {size.max_tokens} patches of {size.patch_size} px"
        head = f"{name}: {pixels}, seed {seed}, context length {vocabulary.context_length}, epoch {self.epoch}"
        if self.views > 1:
            head += f" to {self.epoch + self.views - 1}"
        tiles = training_tiles(built, vocabulary, self.count, self.epoch, self.views)
        write_text(self.out, render_sheet(tiles, head))
        print(f"{self.out}: {self.count} samples, {head}")


def parse_tars(path: str, overrides: Sequence[str]) -> CaptionShardsConfig | ClassShardsConfig:
    """Return the configuration of a source of tars; raise ConfigError if it is of another kind."""
    from vqclip.data import CaptionShardsConfig, ClassShardsConfig, parse_source

    config = parse_source(path, overrides)
    if not isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        raise ConfigError(f"SOURCE: kind {config.kind} has no chunks; expected tars (kind shards or classes)")
    return config
