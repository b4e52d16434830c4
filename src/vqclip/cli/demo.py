"""``vqclip demo``: a page in the browser to try a tokenizer on images and captions of one's own."""

from __future__ import annotations

import argparse
import sys

import torch

from vqclip import dist
from vqclip.demo.answers import Answers
from vqclip.demo.page import serve
from vqclip.runlog.console import print_output


def run(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
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
