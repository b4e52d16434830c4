"""Commands on the folders of runs: pages, tokenizers of checkpoints, copies."""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output

__all__ = ["copy", "export_tokenizer", "report"]


def report(options: argparse.Namespace) -> None:
    """Write the page of a run, or one that compares several."""
    from vqclip.report import write_comparison, write_report

    runs, output = options.runs, options.output
    if output is not None:
        types.require_page("--output", output)
    elif len(runs) > 1:
        wanted = f"expected a file for the comparison of {len(runs)} runs, such as comparison.html"
        raise ConfigError(f"--output: missing, {wanted}")
    try:
        path = write_report(runs[0], output) if len(runs) == 1 else write_comparison(runs, output)
    except OSError as error:
        raise ConfigError(f"--output: {error.filename or output}: cannot be written ({error.strerror})") from error
    print_output(f"{path}: {path.stat().st_size:,} bytes; open it in a browser")


def export_tokenizer(options: argparse.Namespace) -> None:
    """Write the tokenizer folder of a checkpoint."""
    from vqclip.runlog.best import read_best
    from vqclip.train.export import export_checkpoint

    step = read_best(options.run) if options.best else options.step
    print_output(str(export_checkpoint(options.run, step, options.out, options.weights)))


def copy(options: argparse.Namespace) -> None:
    """Copy a run from a URL to a folder."""
    from vqclip.train.run_store import copy_run

    print_output(str(copy_run(options.url, options.folder)))
