"""``vqclip demo``: a page in the browser to try a tokenizer on images and captions of one's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.demo.loading import load_answers
from vqclip.demo.server import is_local, listen, require_gradio, serve, upload_folder
from vqclip.runlog.console import print_output
from vqclip.train.loading import MODEL_HELP


@command("vqclip demo")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: serve the page until Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with listen(options.host, options.port) as listener, upload_folder() as uploads:
        print(f"vqclip demo: loading {options.folder}", file=sys.stderr)
        require_gradio(uploads)
        answers = load_answers(options.folder, options.index, options.images, options.device)
        if answers.search is not None and answers.source is None:
            built_from = answers.search.index.origin.pictures or "PATH"
            print(f"vqclip demo: names alone are shown; for images: --images {built_from}", file=sys.stderr)
        host, port = listener.getsockname()[:2]
        if not is_local(host):
            print(
                f"vqclip demo: warning: --host {options.host}: everyone who can reach port {port} of this machine can "
                "use the page and see what --index and --images show; there is no password",
                file=sys.stderr,
            )
        shown = f"[{host}]" if ":" in host else host
        print_output(f"Open http://{shown}:{port} in a browser. Ctrl-C stops the demo.")
        serve(options.folder, answers, listener, uploads)


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
    add("--device", type=types.device, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    add("--threads", type=types.threads, help="threads of the CPU (all cores)")
    return parser
