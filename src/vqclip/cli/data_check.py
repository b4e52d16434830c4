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
from vqclip.data.prepare import prepare_shard
from vqclip.data.remote import RemoteShard
from vqclip.data.sources.parquet import ParquetConfig, ParquetFile
from vqclip.data.sources.shards import TarSource
from vqclip.data_tools.check import CheckOptions, Finding, check_source, format_report
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_text
from vqclip.runlog.console import print_output
from vqclip.towers.bpe import BPE
from vqclip.towers.vocabulary import MAX_CONTEXT, Vocabulary

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data check photos.csv --context-length 77 --workers 8
  vqclip data check data/captions/train --config configs/captions.yaml --against data/captions/val --json report.json
"""

logger = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=SOURCE_HELP)
    add("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    add(
        "--config",
        type=types.path,
        metavar="FILE",
        help="training configuration: its vocabulary, context length, image size and largest image",
    )
    add(
        "--context-length",
        type=types.whole(3, MAX_CONTEXT),
        metavar="N",
        help="tokens of open_clip's vocabulary after which captions are cut, instead of --config",
    )
    add(
        "--against",
        type=types.text,
        nargs="+",
        metavar=("OTHER", "key=value"),
        help="other data, such as those of an evaluation, whose images should not be in SOURCE; its keys may follow",
    )
    add("--workers", type=types.workers, default=1, help="processes that read and decode (%(default)s)")
    add(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of bad samples for exit status 0 (%(default)s)",
    )
    add("--max-pixels", type=types.count, help=f"larger images are bad samples ({MAX_PIXELS})")
    add(
        "--min-side",
        type=types.whole(1, 100_000),
        help="images with a shorter side give a warning (32, or the image size of --config)",
    )
    add(
        "--examples",
        type=types.whole(0, 1_000_000),
        default=3,
        help="samples named for each kind on the screen (%(default)s)",
    )
    add("--json", type=types.path, metavar="FILE", help="write the report with all names to this file")


def run(options: argparse.Namespace) -> int:
    """Check the source and print the report; return 1 if too many samples are bad."""
    if options.json is not None and not options.json.absolute().parent.is_dir():  # checked before the long work
        raise ConfigError(f"--json: got {options.json}, but there is no folder {options.json.absolute().parent}")
    limits = _limits(options)
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


def _limits(options: argparse.Namespace) -> CheckOptions:
    vocabulary: Vocabulary = BPE(options.context_length or MAX_CONTEXT)
    min_side, max_pixels = 32, MAX_PIXELS
    context_length = options.context_length
    if options.config is not None:
        if context_length is not None:
            raise ConfigError("--context-length: got it beside --config, which has its own; expected one of them")
        from vqclip.data_tools.model_inputs import ModelInputs  # here, as it imports the training code

        inputs = ModelInputs.load(options.config)
        vocabulary, context_length = inputs.vocabulary, inputs.vocabulary.context_length
        min_side, max_pixels = inputs.image_size, inputs.config.data.max_pixels
    return CheckOptions(
        tokenize=vocabulary.with_lengths,
        context_length=context_length,
        max_pixels=options.max_pixels or max_pixels,
        min_side=options.min_side or min_side,
        workers=options.workers,
    )


def _open(path: str, overrides: Sequence[str]) -> tuple[Source, list[Finding]]:
    """Return the source without its damaged shards, and these.

    Raises:
        DataError: all shards are damaged, or the rest cannot be read without them.
    """
    config = parse_source(path, overrides)
    if isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        tars = open_source(config.model_copy(update={"bad_shards": "leave_out"}))
        assert isinstance(tars, TarSource)
        return tars, [Finding(*each) for each in tars.tars.index.facts.damaged.items()]
    whole, damaged = [], []
    for shard in map(ParquetFile, config.files()) if isinstance(config, ParquetConfig) else config.shards():
        try:
            prepare_shard(shard)
            found = getattr(shard, "path", shard)
            whole.append(found.url if isinstance(found, RemoteShard) else str(found))
        except DataError as error:
            logger.warning("%s", error)
            damaged.append(Finding(str(shard), str(error).removeprefix(f"{shard}: ")))
    if not damaged:
        return open_source(config), []
    if not whole or config.kind != "parquet":
        lines = "".join(f"\n  {shard}: {detail}" for shard, detail in damaged)
        raise DataError(f"{path}: {len(damaged)} damaged shards, without which it cannot be read:{lines}")
    return open_source(config.model_copy(update={"path": tuple(whole)})), damaged
