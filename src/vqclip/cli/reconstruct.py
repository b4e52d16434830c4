"""``vqclip reconstruct``: write a page of images beside what their ids decode to."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.data import SourceConfigBase, mask_credentials, open_source, parse_source
from vqclip.data.sources.class_names import CLASSNAMES
from vqclip.data.sources.kinds import find_kind
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import ConfigError
from vqclip.evaluation.reconstructions import DrawnSource, reconstruct
from vqclip.io.atomic import write_text
from vqclip.report.page import reconstructions_page
from vqclip.runlog.console import print_output
from vqclip.tokenizer.loading import load_tokenizer

__all__ = ["run"]


def run(options: argparse.Namespace) -> None:
    """Write the page."""
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
    repeat = mask_credentials(shlex.join(["vqclip", "reconstruct", *options.given_words]))
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
