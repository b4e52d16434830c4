"""``vqclip train``, also ``python -m vqclip.train``: train a configuration."""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vqclip import dist
from vqclip.cli.arguments import Parser
from vqclip.cli.command import command
from vqclip.config import did_you_mean, json_schema, suggest_keys, to_yaml
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError
from vqclip.runlog.console import log_to_stderr, print_output
from vqclip.train import TrainConfig, run
from vqclip.train.tasks.kinds import TASKS, load_task_config

_EXAMPLES = """\
examples:
  vqclip train --config configs/base.yaml run.name=mine optim.lr=1e-3
  torchrun --standalone --nproc-per-node 2 -m vqclip train --config configs/base.yaml
"""
_TIME_TO_REPORT_S = 5.0
"""Wait before a process other than the first of its machine ends."""


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="vqclip train",
        description="Train image and text tokenizers together.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # torchrun takes options that begin like one of its own (--log..., --n..., --max...), so ours have other names.
    parser.add_argument("--config", type=Path, help="YAML file, such as configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--json-schema", action="store_true", help="print a JSON schema for editors and stop")
    return parser


def _unknown_option(option: str, given: Sequence[str]) -> str:
    """Return an error message that suggests keys: ``optim.lr=3`` for ``--lr=3`` and ``--lr 3``."""
    name, is_assigned, value = option.partition("=")
    if not is_assigned and option in given:
        value = next((each for each in given[given.index(option) + 1 :][:1] if not each.startswith("-")), "")
    meant = [f"{path}={value or '...'}" for path in suggest_keys(TrainConfig, name.lstrip("-"))]
    hint = did_you_mean(meant) or "; --print-config lists all keys"
    return f"unknown option {option}: expected section.key=value{hint}"


@command("vqclip.train", failure=1, after_interrupt="what is not in a checkpoint is not kept")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 when the run is finished, or was stopped by a signal and can be resumed (`stopped.json` in
        its folder); 1 for an error, 2 for an invalid configuration, 3 for a run that hung
        (`vqclip.process.watchdog`), 130 for Ctrl-C pressed twice, or before the process group exists.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line()
    options, unknown = parser.parse_known_intermixed_args(given)
    if unknown:
        parser.error(_unknown_option(unknown[0], given))
    log_to_stderr(mask_credentials)
    if options.json_schema:
        print_output(json.dumps(json_schema(functools.reduce(operator.or_, TASKS.values())), indent=2))
        return 0
    try:
        config = load_task_config(options.config, options.overrides)
    except ConfigError as error:
        # All processes of a machine read the same file, so one of them reports the error. torchrun kills the others as
        # soon as the first process ends: they wait, so that the one that reports can finish.
        if dist.local_rank() == 0:
            if options.config is None and ": missing;" in str(error):
                hint = "no --config given, so required sections are missing; for example --config configs/base.yaml"
                raise ConfigError(f"{hint}\n{error}") from None
            raise
        time.sleep(_TIME_TO_REPORT_S)
        return 2
    if options.print_config:
        print_output(to_yaml(config).removesuffix("\n"))
        return 0
    result = run(config, owns_process=True)  # the first Ctrl-C is handled inside: it saves a checkpoint and stops
    if int(os.environ.get("RANK", "0")) == 0:
        print(result)
    return 0
