"""``vqclip data check``: read every sample, and report what is bad, duplicated or unusual.

The exit status is 1 if more samples than --bad-fraction cannot be used; training would stop there too. Warnings
(duplicates, captions that are cut, classes without images, unusual images) do not change it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence

from vqclip.cli import arguments as types
from vqclip.cli.data_pack import OVERRIDES_HELP, SOURCE_HELP
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, Source, open_source, parse_source
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.remote import RemoteShard
from vqclip.data.sources.parquet import ParquetConfig, ParquetFile
from vqclip.data.sources.shards import TarSource
from vqclip.data_tools.check import CheckOptions, Finding, check_source, format_report
from vqclip.data_tools.show import ModelInputs
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_text
from vqclip.runlog.console import print_output
from vqclip.towers.vocabulary import BPE, MAX_CONTEXT, Vocabulary

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data check photos.csv --context-length 77 --workers 8
  vqclip data check data/captions/train --config configs/captions.yaml --against data/captions/val --json report.json
"""
_MIN_SIDE = 32

logger = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=SOURCE_HELP)
    add("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    help_text = "training configuration: its vocabulary, context length, image size and largest image"
    add("--config", type=types.path, metavar="FILE", help=help_text)
    help_text = "tokens of open_clip's vocabulary after which captions are cut, instead of --config"
    add("--context-length", type=types.whole(3, MAX_CONTEXT), metavar="N", help=help_text)
    help_text = "other data, such as those of an evaluation, whose images should not be in SOURCE; its keys may follow"
    add("--against", type=types.text, nargs="+", metavar=("OTHER", "key=value"), help=help_text)
    add("--workers", type=types.workers, default=1, help="processes that read and decode (%(default)s)")
    help_text = "largest share of bad samples for exit status 0 (%(default)s)"
    add("--bad-fraction", type=types.share, default=0.01, help=help_text)
    add("--max-pixels", type=types.count, help=f"larger images are bad samples ({MAX_PIXELS})")
    help_text = f"images with a shorter side give a warning ({_MIN_SIDE}, or the image size of --config)"
    add("--min-side", type=types.whole(1, 100_000), help=help_text)
    help_text = "samples named for each kind on the screen (%(default)s)"
    add("--examples", type=types.whole(0, 1_000_000), default=3, help=help_text)
    add("--json", type=types.path, metavar="FILE", help="write the report with all names to this file")


def run(options: argparse.Namespace) -> int:
    """Check the source and print the report; return 1 if too many samples are bad."""
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
