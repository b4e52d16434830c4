"""Write a page of images beside what their ids decode to: originals, reconstructions, differences.

vqclip reconstruct runs/pixels/tokenizer --data path/to/images -o page.html
vqclip reconstruct runs/pixels/tokenizer --data "val/{00000..00003}.tar" captions=json json_keys=[caption] -o page.html
vqclip reconstruct runs/pixels/tokenizer --data path/to/cls_eurosat --split test -o page.html
vqclip reconstruct runs/pixels/tokenizer --data kind=scenes split=val -o page.html

The tokenizer needs a pixel decoder. Images are drawn from the data by --seed; of these, the page shows the worst,
median and best by PSNR, each decoded from its first residual stages and codebooks, and from all ids. The page is one
file that needs no network and runs no script.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.data import SourceConfigBase, mask_credentials, open_source, parse_source
from vqclip.data.sources.class_names import CLASSNAMES, SPLIT_HELP
from vqclip.data.sources.kinds import find_kind
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import ConfigError
from vqclip.evaluation.images import ImagesConfig
from vqclip.evaluation.reconstructions import DrawnSource, reconstruct
from vqclip.io.atomic import write_text
from vqclip.report.images import MAX_SIDE
from vqclip.report.page import reconstructions_page
from vqclip.runlog.console import print_output
from vqclip.tokenizer.loading import load_tokenizer

__all__ = ["main"]


@command("vqclip reconstruct")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    options = _parser().parse_args(given)
    types.require_page("--output", options.output, replace=options.force)
    tokenizer = load_tokenizer(options.tokenizer, "image").to(dist.choose_device(options.device, "--device"))
    if tokenizer.pixels is None:
        raise ConfigError(
            f"{options.tokenizer}: has no pixel decoder; expected the tokenizer folder of a run that has trained one, "
            "with `task: pixels` or with model.image.pixels"
        )
    drawn = DrawnSource(open_source(_data(options)), options.images, options.seed)
    reading = {"batch_size": options.batch_size, "workers": options.workers, "max_bad_fraction": options.bad_fraction}
    with explain_worker_deaths("reconstruct") if options.workers else contextlib.nullcontext():
        found = reconstruct(tokenizer, drawn, options.show, options.side, **reading)
    place, shown = (mask_credentials(each) for each in (options.tokenizer, " ".join(options.data)))
    facts = [f"{found.images:,} images of {shown}, drawn by seed {options.seed}", f"tokenizer {place}"]
    if found.bad:
        facts.append(f"{found.bad:,} images cannot be used and are left out")
    side = min(options.side, tokenizer.pixels.image_size)
    repeat = mask_credentials(shlex.join(["vqclip", "reconstruct", *given]))
    write_text(options.output, reconstructions_page(f"Reconstructions of {shown}", found, facts, repeat, side=side))
    _, bits, figures = found.decodings[-1]
    print_output(
        f"{options.output}: {found.images:,} images, {bits:,.0f} bits an image, PSNR {figures['psnr']:.2f} dB; "
        f"{options.output.stat().st_size:,} bytes; open it in a browser"
    )


def _data(options: argparse.Namespace) -> SourceConfigBase:
    paths, overrides = types.paths_and_overrides(options.data)
    defaults: dict[str, str] = {}
    if any((Path(path).expanduser() / CLASSNAMES).is_file() for path in paths):
        defaults["kind"] = "classes"
    elif paths and not any(each.startswith("kind=") for each in overrides) and find_kind(paths) == "folder":
        defaults |= {"kind": "folder", "captions": "names"}  # every image, with captions or without
    data = parse_source(paths, overrides, split=options.split, **defaults)
    data.require_no_weight("vqclip reconstruct")
    return data


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip reconstruct", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("tokenizer", type=types.text, help="tokenizer folder with a pixel decoder, or hub name (owner/name)")
    add(
        "--data",
        type=types.text,
        required=True,
        nargs="+",
        action="extend",
        metavar=("PATH", "key=value"),
        help="images: a folder of image files, a table, tars, a pattern or URL, and keys of the kind, such as kind=csv",
    )
    add("--split", help=f"of data with several: {SPLIT_HELP}")
    add("-o", "--output", type=types.path, required=True, metavar="FILE", help="the page")
    add("--force", action="store_true", help="replace an existing page")
    add("--images", type=types.whole(1, 10_000), default=256, help="images that are drawn and decoded (%(default)s)")
    add("--seed", type=types.whole(0, 2**63 - 1), default=0, help="seed of the draw (%(default)s)")
    add(
        "--show",
        type=types.whole(1, 32),
        default=4,
        help="images of each of worst, median and best on the page (%(default)s)",
    )
    add(
        "--side",
        type=types.whole(16, MAX_SIDE),
        default=256,
        help="largest side of an image on the page, in pixels; PSNR is always of the full size (%(default)s)",
    )
    types.add_fields(parser, ImagesConfig, "batch_size", "workers")
    add(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of unusable images; they are left out (%(default)s)",
    )
    add("--device", type=types.text, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    return parser
