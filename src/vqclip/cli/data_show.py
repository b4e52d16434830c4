"""``vqclip data show``: make a contact sheet of what the model sees.

Images are decoded, cropped, augmented and resized as training does it, in its order; captions are shown as their
tokens, and what is cut in red. With --config, data, transform, image size, vocabulary and seed are those of a training
configuration, and key=value changes the configuration; without it they are those of SOURCE and the defaults.
"""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.cli.data_pack import SOURCE_HELP
from vqclip.data import DataConfig, TrainData, parse_source
from vqclip.data_tools.model_inputs import ModelInputs
from vqclip.data_tools.show import render_sheet, training_tiles
from vqclip.errors import ConfigError
from vqclip.io.atomic import write_text
from vqclip.towers import BPE, Vocabulary
from vqclip.towers.vocabulary import MAX_CONTEXT

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data show photos.csv --out sheet.html
  vqclip data show --config configs/captions.yaml --out sheet.html --views 4 data.transform.flip=0.5
"""
_IMAGE_SIZE, _CONTEXT, _MOST = 224, 77, 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add(
        "given",
        nargs="*",
        metavar="SOURCE key=value",
        help=f"{SOURCE_HELP}, and its keys; with --config: keys of the configuration",
    )
    add("--out", type=types.path, required=True, metavar="FILE", help="HTML page to write")
    add("--config", type=types.path, metavar="FILE", help="training configuration")
    add("--count", type=types.whole(1, _MOST), default=24, help="samples (%(default)s)")
    add(
        "--views",
        type=types.whole(1, 32),
        default=1,
        help="views of each image side by side, those of as many epochs (%(default)s)",
    )
    add("--epoch", type=types.whole(0, 2**31), default=0, help="epoch whose first samples are shown (%(default)s)")
    add(
        "--seed",
        type=types.whole(0, 2**63 - 1),
        help="seed of order and augmentation (0, or run.seed of the configuration)",
    )
    add(
        "--image-size",
        type=types.whole(1, 4096),
        help=f"side of the images in pixels, without --config ({_IMAGE_SIZE})",
    )
    add(
        "--context-length", type=types.whole(3, MAX_CONTEXT), help=f"tokens of a caption, without --config ({_CONTEXT})"
    )


def run(options: argparse.Namespace) -> None:
    """Write the sheet."""
    if options.out.suffix.lower() != ".html":
        raise ConfigError(f"--out: got {options.out}; a sheet is a page: expected a name that ends in .html")
    if not options.out.absolute().parent.is_dir():  # checked before the work
        raise ConfigError(f"--out: got {options.out}, but there is no folder {options.out.absolute().parent}")
    data, vocabulary, head = _of_config(options) if options.config else _of_source(options)
    head += f", context length {vocabulary.context_length}, epoch {options.epoch}"
    if options.views > 1:
        head += f" to {options.epoch + options.views - 1}"
    tiles = training_tiles(data, vocabulary, options.count, options.epoch, options.views)
    write_text(options.out, render_sheet(tiles, head))
    print(f"{options.out}: {options.count} samples, {head}")


def _of_config(options: argparse.Namespace) -> tuple[TrainData, Vocabulary, str]:
    for name in ("image_size", "context_length"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: got it beside --config, which has its own; expected one of them")
    inputs = ModelInputs.load(options.config, options.given)
    config = inputs.config
    seed = config.run.seed if options.seed is None else options.seed
    in_process = config.data.model_copy(update={"workers": 0})
    data = in_process.build(inputs.image_size, inputs.vocabulary.with_lengths, config.train.batch_size, seed)
    return data, inputs.vocabulary, f"{options.config}: {inputs.image_size} px, seed {seed}"


def _of_source(options: argparse.Namespace) -> tuple[TrainData, Vocabulary, str]:
    if not options.given:
        raise ConfigError("got neither SOURCE nor --config; expected one of them")
    path, *overrides = options.given
    size, vocabulary = options.image_size or _IMAGE_SIZE, BPE(options.context_length or _CONTEXT)
    config = DataConfig(sources=(parse_source(path, overrides),), workers=0)
    data = config.build(size, vocabulary.with_lengths, 1, options.seed or 0)
    return data, vocabulary, f"{path}: {size} px, seed {options.seed or 0}"
