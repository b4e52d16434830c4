"""``vqclip train``, also ``python -m vqclip.train``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vqclip import dist
from vqclip.config import did_you_mean, json_schema, load_config, suggest_keys, to_yaml
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError, VqclipError
from vqclip.runlog.console import log_to_stderr, print_error, print_interrupt, print_output, unfailing_streams
from vqclip.train import TrainConfig, run
from vqclip.train.summary import render

_TIME_TO_SPEAK_S = 5.0


def command_line() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="vqclip.train", description="Train image and text tokenizers together.")
    # torchrun takes any option that begins like one of its own (--log..., --n..., --max...), so ours do not.
    parser.add_argument("--config", type=Path, help="YAML file, such as configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--json-schema", action="store_true", help="print a JSON schema for editors and stop")
    return parser


def _unknown_option(option: str, given: Sequence[str]) -> str:
    """Name the keys that an option may stand for: ``--lr=3`` and ``--lr 3`` are ``optim.lr=3`` here."""
    name, is_assigned, value = option.partition("=")
    if not is_assigned and option in given:
        value = next((each for each in given[given.index(option) + 1 :][:1] if not each.startswith("-")), "")
    meant = [f"{path}={value or '...'}" for path in suggest_keys(TrainConfig, name.lstrip("-"))]
    hint = did_you_mean(meant) or "; --print-config lists all keys"
    return f"unknown option {option}: expected section.key=value{hint}"


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0 when the run is finished, or was stopped by a signal and can go on, which `stopped.json` in
        its folder then says; 1 for an error, 2 for a configuration that cannot be used, 3 for a run that hung (see
        `vqclip.process.watchdog`), 130 for Ctrl-C pressed twice, or before the ranks have met.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line()
    options, unknown = parser.parse_known_intermixed_args(given)
    if unknown:
        parser.error(_unknown_option(unknown[0], given))
    log_to_stderr(mask_credentials)
    try:
        if options.json_schema:
            print_output(json.dumps(json_schema(TrainConfig), indent=2))
            return 0
        config = load_config(TrainConfig, options.config, options.overrides)
    except ConfigError as error:
        # All processes of a machine read the same file: one of them says so. torchrun ends them all when the first of
        # them ends, so the others give that one time to speak.
        if dist.local_rank() == 0:
            return _fail(error, 2)
        time.sleep(_TIME_TO_SPEAK_S)
        return 2
    except OSError as error:
        return _fail(error, 1)
    try:
        if options.print_config:
            print_output(to_yaml(config).removesuffix("\n"))
            return 0
        summary = run(config)
    except VqclipError as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # a disk that is full, a folder that may not be written to
        return _fail(error, 1)
    except KeyboardInterrupt:  # the first one is a `StopSignals` flag
        return print_interrupt("vqclip.train", "what is not in a checkpoint is not kept")
    if summary is not None and int(os.environ.get("RANK", "0")) == 0:
        print(render(summary))
    return 0


def _fail(error: VqclipError | OSError, status: int) -> int:
    print_error("vqclip.train", error, mask_credentials)
    return status
