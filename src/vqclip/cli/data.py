"""``vqclip data``: draw the scenes data set; pack, check, index and show data of any kind; store features.

Each function imports what it needs: several processes of ``vqclip data index`` start without the training code.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vqclip.cli import arguments as types
from vqclip.config import load_config
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, Source, open_source, parse_source
from vqclip.data.remote import RemoteShard, is_tar, protocol_of
from vqclip.data.remote.urls import split_query
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_text
from vqclip.io.files import expand_home
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    from vqclip.data_tools.check import Finding

__all__ = ["check", "draw", "features", "index", "pack_source", "parse_tars", "show"]

_TILES = 40
"""Images on the sheet of the scenes data set."""
_MIN_SIDE, _IMAGE_SIZE, _CONTEXT = 32, 224, 77
"""Without a configuration: side of images below which `check` warns; side of images and tokens of texts in `show`."""

logger = logging.getLogger(__name__)


def draw(options: argparse.Namespace) -> None:
    """Draw the scenes data set, and the sheet."""
    from vqclip.data_tools.show import render_sheet, source_tiles
    from vqclip.scenes.make import ScenesConfig, make_scenes

    if options.contact_sheet:
        types.require_page("--contact-sheet", options.contact_sheet)  # before the long work
    paths = make_scenes(options.out, load_config(ScenesConfig, None, options.overrides))
    for split in ("train", "val", "test", "heldout"):
        print(f"{split:8} {getattr(paths, split)}")
    if options.contact_sheet:
        source = CaptionShardsConfig(path=str(getattr(paths, options.split))).build(options.out)
        write_text(options.contact_sheet, render_sheet(source_tiles(source, _TILES), f"{options.split} of scenes"))
        print(f"sheet    {options.contact_sheet}")


def pack_source(options: argparse.Namespace) -> None:
    """Pack the source, and print where it is and how it is read."""
    from vqclip.data import FolderConfig
    from vqclip.data.sources.packed import PackedConfig
    from vqclip.data_tools.pack import Options, pack

    config, out = parse_source(options.source, options.overrides), expand_home(options.out).absolute()
    if isinstance(config, FolderConfig) and out.resolve().is_relative_to(config.listing.resolve()):
        raise ConfigError(f"OUT: {out} is inside SOURCE, whose folders are data; expected a folder elsewhere")
    data = config if isinstance(config, PackedConfig) and config.image_files() is None else open_source(config)
    fields = ("split", "shard_size", "workers", "bad_fraction", "max_pixels")
    done = pack(data, Options(out=out, **{name: getattr(options, name) for name in fields}))
    print(done.describe(out), flush=True)


def check(options: argparse.Namespace) -> int:
    """Check the source and print the report; return 1 if too many samples are bad."""
    from vqclip.data.decode import MAX_PIXELS
    from vqclip.data_tools.check import CheckOptions, check_source, format_report
    from vqclip.data_tools.show import ModelInputs
    from vqclip.towers.vocabulary import BPE, MAX_CONTEXT, Vocabulary

    if options.json is not None and not options.json.absolute().parent.is_dir():  # checked before the long work
        raise ConfigError(f"--json: got {options.json}, but there is no folder {options.json.absolute().parent}")
    context_length = options.context_length
    vocabulary: Vocabulary = BPE(context_length or MAX_CONTEXT)
    min_side, max_pixels = _MIN_SIDE, MAX_PIXELS
    if options.config is not None:
        if context_length is not None:
            raise ConfigError("--context-length: got it beside --config, which has its own; expected one of them")
        config, min_side, vocabulary = ModelInputs.load(options.config)
        context_length, max_pixels = vocabulary.context_length, config.data.max_pixels
    limits = CheckOptions(
        tokenize=vocabulary.with_lengths,
        context_length=context_length,
        max_pixels=options.max_pixels or max_pixels,
        min_side=options.min_side or min_side,
        workers=options.workers,
    )
    source, damaged = _open(options.source, options.overrides)
    against = None if options.against is None else open_source(parse_source(options.against[0], options.against[1:]))
    report = check_source(source, limits, against)
    if damaged:
        report.bad = {"damaged shard": damaged, **report.bad}
    print_output(format_report(report, options.examples))
    if options.json is not None:
        write_text(options.json, json.dumps(report.to_json(), indent=1, ensure_ascii=True) + "\n")
    share = report.bad_samples / max(1, report.samples)
    if not damaged and share <= options.bad_fraction:
        return 0
    what = f"{len(damaged)} damaged shards" if damaged else f"{100 * share:.2f} % of the samples are bad"
    print_output(f"\nnot usable as it is: {what}; --bad-fraction allows {100 * options.bad_fraction:g} % bad samples")
    return 1


def _open(path: str, overrides: Sequence[str]) -> tuple[Source, list[Finding]]:
    """Return the source without its damaged tars or Parquet files, and these.

    Raises:
        DataError: all of them are damaged, or the rest cannot be read.
    """
    from vqclip.data.sources.parquet import ParquetConfig, ParquetFile
    from vqclip.data.sources.shards import TarSource
    from vqclip.data_tools.check import Finding

    config = parse_source(path, overrides)
    if isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        tars = open_source(config.model_copy(update={"bad_shards": "leave_out"}))
        assert isinstance(tars, TarSource)
        return tars, [Finding(*each) for each in tars.tars.index.facts.damaged.items()]
    damaged: list[Finding] = []
    if isinstance(config, ParquetConfig):
        whole = []
        for file in config.files():
            try:
                ParquetFile(file).prepare()
                whole.append(file.url if isinstance(file, RemoteShard) else str(file))
            except DataError as error:
                logger.warning("%s", error)
                damaged.append(Finding(str(file), str(error).removeprefix(f"{file}: ")))
        config = config.model_copy(update={"path": tuple(whole)}) if whole and damaged else config
    return open_source(config), damaged


def index(options: argparse.Namespace) -> None:
    """Make the index, and print where it is and how training finds it."""
    from vqclip.data_tools.index import index_shards

    tars = parse_tars(options.source, options.overrides).tar_set()
    print_output(index_shards(tars, options.chunk, options.workers, options.out))


def parse_tars(path: str, overrides: Sequence[str]) -> CaptionShardsConfig | ClassShardsConfig:
    """Return the configuration of a source of tars; a folder at a URL is of kind classes if a split is named.

    Raises:
        ConfigError: it is of another kind.
    """
    keys = {each.partition("=")[0] for each in overrides}
    if "kind" not in keys and protocol_of(path) not in (None, "file") and not is_tar(split_query(path)[0]):
        overrides = [f"kind={'classes' if 'split' in keys else 'shards'}", *overrides]
    config = parse_source(path, overrides)
    if not isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        raise ConfigError(f"SOURCE: kind {config.kind} has no chunks; expected tars (kind shards or classes)")
    return config


def features(options: argparse.Namespace) -> None:
    """Store the features of a run's frozen towers."""
    from vqclip.train.fill_features import fill_features, fill_features_on_ray
    from vqclip.train.tasks.kinds import load_task_config

    ray = types.ray_options(options)
    config = load_task_config(options.config, options.overrides)
    if ray is None:
        fill_features(config)
    else:
        print(fill_features_on_ray(config, ray), flush=True)


def show(options: argparse.Namespace) -> None:
    """Write a contact sheet of what the model sees."""
    from vqclip.data import DataConfig
    from vqclip.data_tools.show import ModelInputs, render_sheet, training_tiles
    from vqclip.towers.vocabulary import BPE

    types.require_page("--out", options.out)
    if not options.config and not options.given:
        raise ConfigError("got neither SOURCE nor --config; expected one of them")
    if options.config:
        for name in ("image_size", "context_length"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option}: got it beside --config, which has its own; expected one of them")
        config, size, vocabulary = ModelInputs.load(options.config, options.given)
        data, batch, default, name = config.data, config.train.batch_size, config.run.seed, options.config
    else:
        name, *overrides = options.given
        data, batch, default = DataConfig(sources=(parse_source(name, overrides),)), 1, 0
        size, vocabulary = options.image_size or _IMAGE_SIZE, BPE(options.context_length or _CONTEXT)
    seed = default if options.seed is None else options.seed
    built = data.model_copy(update={"workers": 0}).build(size, vocabulary.with_lengths, batch, seed)
    head = f"{name}: {size} px, seed {seed}, context length {vocabulary.context_length}, epoch {options.epoch}"
    if options.views > 1:
        head += f" to {options.epoch + options.views - 1}"
    tiles = training_tiles(built, vocabulary, options.count, options.epoch, options.views)
    write_text(options.out, render_sheet(tiles, head))
    print(f"{options.out}: {options.count} samples, {head}")
