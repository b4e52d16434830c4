"""Arguments of ``vqclip data``, as those of the other commands in `vqclip.cli.options`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vqclip.cli import arguments as types

__all__ = ["PARSERS", "SOURCE_KEYS"]

_SOURCE = "file, folder, pattern or URL of the data"
SOURCE_KEYS = "keys of the source, such as kind=csv captions=title; see docs/data.md"
_SOURCE_OR_CONFIG = f"{_SOURCE}, and its keys; with --config: keys of the configuration"


def _draw(parser: argparse.ArgumentParser) -> None:
    """Draw the scenes data set.

    Splits: train, val: captioned; test, heldout: labelled, for zero-shot.

    Examples:
      vqclip data draw --contact-sheet sheet.html train=500 image_size=128
    """
    add = parser.add_argument
    add("--out", type=types.path, help="folder to draw into (default: $VQCLIP_CACHE or ~/.cache/vqclip)")
    help_text = "also write images with their captions as an HTML page"
    add("--contact-sheet", type=types.path, metavar="FILE", help=help_text)
    add("--split", choices=("train", "val"), default="train", help="captioned split on the contact sheet (%(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="e.g. image_size=224 train=500 seed=1")


def _pack(parser: argparse.ArgumentParser) -> None:
    """Write data of any kind as WebDataset shards.

    Captioned images become OUT/00000.tar, ... as img2dataset writes them; labelled ones OUT/SPLIT/0.tar, ... beside the
    class names and prompts, as clip_benchmark does. Images keep their bytes, and samples their order. Run the same
    command again to continue after a stop; machines that share OUT run it at the same time.

    Examples:
      vqclip data pack photos.csv shards/photos
      vqclip data pack /datasets/flowers shards/flowers --split train --workers 8
      vqclip data pack annotations.json shards/coco --workers 8      # on each of four machines that share the folder
    """
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=_SOURCE)
    add("out", type=types.path, metavar="OUT", help="folder to write to: a new one, or one that was begun")
    add("overrides", nargs="*", metavar="key=value", help=SOURCE_KEYS)
    add("--split", type=types.folder_name, default="train", help="folder of the shards of labelled data (%(default)s)")
    help_text = "samples in a shard, unusable ones included; sources that are read in pieces have a shard for each "
    add("--shard-size", type=types.whole(1, 1_000_000), default=10_000, help=f"{help_text}(%(default)s)")
    help_text = "processes that read, verify and write; any number writes the same bytes (%(default)s)"
    add("--workers", type=types.workers, default=1, help=help_text)
    help_text = "largest share of samples that are left out, named in bad_samples.jsonl (%(default)s)"
    add("--bad-fraction", type=types.share, default=0.01, help=help_text)
    add("--max-pixels", type=types.count, default=50_000_000, help="larger images cannot be used (%(default)s)")


def _check(parser: argparse.ArgumentParser) -> None:
    """Read every sample, and report what is bad, duplicated or unusual.

    The exit status is 1 if more samples than --bad-fraction cannot be used; training would stop there too. Warnings
    (duplicates, captions that are cut, classes without images, unusual images) do not change it.

    Examples:
      vqclip data check photos.csv --context-length 77 --workers 8
      vqclip data check data/captions/train --config configs/captions.yaml --against data/captions/val
    """
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=_SOURCE)
    add("overrides", nargs="*", metavar="key=value", help=SOURCE_KEYS)
    help_text = "training configuration: its vocabulary, context length, image size and largest image"
    add("--config", type=types.path, metavar="FILE", help=help_text)
    help_text = "tokens of open_clip's vocabulary after which captions are cut, instead of --config"
    add("--context-length", type=types.context_length, metavar="N", help=help_text)
    help_text = "other data, such as those of an evaluation, whose images should not be in SOURCE; its keys may follow"
    add("--against", type=types.text, nargs="+", metavar=("OTHER", "key=value"), help=help_text)
    add("--workers", type=types.workers, default=1, help="processes that read and decode (%(default)s)")
    help_text = "largest share of bad samples for exit status 0 (%(default)s)"
    add("--bad-fraction", type=types.share, default=0.01, help=help_text)
    add("--max-pixels", type=types.count, help="larger images are bad samples (50000000)")
    help_text = "images with a shorter side give a warning (32, or the image size of --config)"
    add("--min-side", type=types.whole(1, 100_000), help=help_text)
    help_text = "samples named for each kind on the screen (%(default)s)"
    add("--examples", type=types.whole(0, 1_000_000), default=3, help=help_text)
    add("--json", type=types.path, metavar="FILE", help="write the report with all names to this file")


def _index(parser: argparse.ArgumentParser) -> None:
    """Make the index of tars that training needs.

    It reads every shard once and stores none. Any number of processes and machines may run the same command at once:
    they share the work. Run it again after a stop, or when shards have changed: the others are not read again.

    Examples:
      vqclip data index s3://bucket/shards
      vqclip data index '/datasets/web/{00000..00999}.tar' --workers 8
      vqclip data index 'https://data.example.org/{00000..00999}.tar' --out /tmp/index
    """
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=f"{_SOURCE}: tars")
    add("overrides", nargs="*", metavar="key=value", help=SOURCE_KEYS)
    add("--out", type=types.text, metavar="FOLDER", help="folder or its URL (beside the shards, else the cache)")
    help_text = "samples of a chunk; data.order.chunk must be a multiple of it (%(default)s)"
    add("--chunk", type=types.whole(1, 1 << 20), default=128, help=help_text)
    help_text = "shards that are read at a time; on fast disks start several processes instead (%(default)s)"
    add("--workers", type=types.whole(1, 512), default=4, help=help_text)


def _features(parser: argparse.ArgumentParser) -> None:
    """Store the features of a run's frozen towers before it starts.

    The run finds them and starts at once. With --engine ray they are computed on a cluster, whose machines share the
    folder data.feature_cache.folder and have the kind of device that the run will have.

    Examples:
      vqclip data features --config configs/pretrained.yaml
      vqclip data features --config configs/pretrained.yaml data.feature_cache.folder=/shared/features --engine ray
    """
    parser.add_argument("--config", type=types.path, required=True, metavar="FILE", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    types.add_engine(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    """Say what the data of a run need before it starts; by formulas, no sample is read.

    Whether they fit the cache, whether an index is needed, and bytes and requests of an epoch, under either order.
    Their size comes from the index of SOURCE (vqclip data index), or from --samples, --shards and --bytes. With
    --config, sources, window and cache are those of a training configuration, and key=value changes it.

    Examples:
      vqclip data plan --samples 1.3e9 --shards 130000 --bytes 10e12 --machines 64
      vqclip data plan s3://bucket/shards remote.cache_gib=500 --machines 4
      vqclip data plan --config configs/vit_b16.yaml data.order.kind=windowed data.order.window=8192 --machines 2
    """
    add = parser.add_argument
    add("given", nargs="*", metavar="SOURCE key=value", help=_SOURCE_OR_CONFIG)
    add("--config", type=types.path, metavar="FILE", help="training configuration")
    for name, text in (("samples", "samples of the data"), ("shards", "their shards"), ("bytes", "their size")):
        help_text = f"{text}, all three instead of SOURCE; 1.3e9 is a number"
        add(f"--{name}", type=types.large_number, metavar="N", help=help_text)
    add("--machines", type=types.whole(1, 100_000), default=1, metavar="N", help="machines (%(default)s)")
    add("--json", action="store_true", help="print the figures as JSON")


def _show(parser: argparse.ArgumentParser) -> None:
    """Make a contact sheet of what the model sees.

    Images are decoded, cropped, augmented and resized as training does it, in its order; captions are shown as their
    tokens, and what is cut in red. With --config, data, transform, image size, vocabulary and seed are those of a
    training configuration, and key=value changes the configuration; without it they are those of SOURCE and the
    defaults.

    Examples:
      vqclip data show photos.csv --out sheet.html
      vqclip data show --config configs/captions.yaml --out sheet.html --views 4 data.transform.flip=0.5
    """
    add = parser.add_argument
    add("given", nargs="*", metavar="SOURCE key=value", help=_SOURCE_OR_CONFIG)
    add("--out", type=types.path, required=True, metavar="FILE", help="HTML page to write")
    add("--config", type=types.path, metavar="FILE", help="training configuration")
    add("--count", type=types.whole(1, 1000), default=24, help="samples (%(default)s)")
    help_text = "views of each image side by side, those of as many epochs (%(default)s)"
    add("--views", type=types.whole(1, 32), default=1, help=help_text)
    add("--epoch", type=types.whole(0, 2**31), default=0, help="epoch whose first samples are shown (%(default)s)")
    help_text = "seed of order and augmentation (0, or run.seed of the configuration)"
    add("--seed", type=types.whole(0, 2**63 - 1), help=help_text)
    add("--image-size", type=types.whole(1, 4096), help="side of the images in pixels, without --config (224)")
    add("--context-length", type=types.context_length, help="tokens of a caption, without --config (77)")


PARSERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "data draw": _draw,
    "data pack": _pack,
    "data check": _check,
    "data index": _index,
    "data features": _features,
    "data plan": _plan,
    "data show": _show,
}
"""Commands and the functions that add their arguments."""
