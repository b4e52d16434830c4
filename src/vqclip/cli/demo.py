"""``vqclip demo``: a page in the browser to try a tokenizer on images and captions of one's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.demo.answers import Answers
from vqclip.demo.page import serve
from vqclip.runlog.console import print_output
from vqclip.train.loading import MODEL_HELP


@command("vqclip demo")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: serve the page until Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    answers = Answers.load(
        options.folder, options.index, options.images, dist.choose_device(options.device, "--device")
    )
    if options.host not in ("127.0.0.1", "localhost", "::1"):
        who = "everyone who can reach this machine can use the page, and see what --index and --images show"
        print(f"vqclip demo: warning: --host {options.host}: {who}; there is no password", file=sys.stderr)

    def ready(address: str) -> None:
        print_output(f"Open {address} in a browser. Ctrl-C stops the demo.")

    serve(options.folder, answers, options.host, options.port, ready)


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip demo",
        description="Show in the browser what a tokenizer makes of an image or a caption: ids, bits, the probabilities "
        "of classes, and the nearest items of an index. Needs pip install 'vqclip[demo]'.",
    )
    add = parser.add_argument
    add("folder", type=types.text, help=f"{MODEL_HELP}; one modality is enough")
    add("--index", type=types.path, help="index of vqclip search build, whose nearest items are shown")
    add("--images", type=types.text, help="images that the index was built from, to show them")
    add("--host", type=types.text, default="127.0.0.1", help="address to listen on; others open the page to a network")
    add("--port", type=types.whole(0, 65535), default=7860, help="port; 0: any that is free (%(default)s)")
    add("--device", type=types.text, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    add("--threads", type=types.threads, help="threads of the CPU (all cores)")
    return parser
