"""``vqclip data show``: make a contact sheet of what the model sees.

Images are decoded, cropped, augmented and resized as training does it, in its order; captions are shown as their
tokens, and what is cut in red. With --config, data, transform, image size, vocabulary and seed are those of a training
configuration, and key=value changes the configuration; without it they are those of SOURCE and the defaults.
"""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.cli.data_pack import GIVEN_HELP
from vqclip.data import DataConfig, parse_source
from vqclip.data_tools.show import ModelInputs, render_sheet, training_tiles
from vqclip.errors import ConfigError
from vqclip.io.atomic import write_text
from vqclip.towers import BPE
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
    add("given", nargs="*", metavar="SOURCE key=value", help=GIVEN_HELP)
    add("--out", type=types.path, required=True, metavar="FILE", help="HTML page to write")
    add("--config", type=types.path, metavar="FILE", help="training configuration")
    add("--count", type=types.whole(1, _MOST), default=24, help="samples (%(default)s)")
    help_text = "views of each image side by side, those of as many epochs (%(default)s)"
    add("--views", type=types.whole(1, 32), default=1, help=help_text)
    add("--epoch", type=types.whole(0, 2**31), default=0, help="epoch whose first samples are shown (%(default)s)")
    help_text = "seed of order and augmentation (0, or run.seed of the configuration)"
    add("--seed", type=types.whole(0, 2**63 - 1), help=help_text)
    help_text = f"side of the images in pixels, without --config ({_IMAGE_SIZE})"
    add("--image-size", type=types.whole(1, 4096), help=help_text)
    help_text = f"tokens of a caption, without --config ({_CONTEXT})"
    add("--context-length", type=types.whole(3, MAX_CONTEXT), help=help_text)


def run(options: argparse.Namespace) -> None:
    """Write the sheet."""
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
