"""``vqclip train``, also ``python -m vqclip.train``: train a configuration."""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import time
from collections.abc import Sequence

from vqclip import dist, train
from vqclip.config import did_you_mean, json_schema, suggest_keys, to_yaml
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output
from vqclip.train.tasks.kinds import TASKS, load_task_config

_TIME_TO_REPORT_S = 5.0
"""Wait before a process other than the first of its machine ends."""


def _unknown_option(option: str, given: Sequence[str]) -> str:
    """Return an error message that suggests keys: ``optim.lr=3`` for ``--lr=3`` and ``--lr 3``."""
    name, is_assigned, value = option.partition("=")
    if not is_assigned and option in given:
        value = next((each for each in given[given.index(option) + 1 :][:1] if not each.startswith("-")), "")
    meant = [f"{path}={value or '...'}" for path in suggest_keys(train.TrainConfig, name.lstrip("-"))]
    hint = did_you_mean(meant) or "; --print-config lists all keys"
    return f"unknown option {option}: expected section.key=value{hint}"


def run(options: argparse.Namespace) -> int:
    """Train, or print the configuration or the schema.

    Returns:
        The exit status: 0 when the run is finished, or was stopped by a signal and can be resumed (`stopped.json` in
        its folder); 2 for an invalid configuration whose error another process reports. Other statuses: 1 for an error,
        3 for a run that hung (`vqclip.process.watchdog`), 130 for Ctrl-C pressed twice, or before the process group
        exists.
    """
    if options.others:
        raise ConfigError(_unknown_option(options.others[0], options.given_words))
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
    result = train.run(config, owns_process=True)  # the first Ctrl-C is handled inside: it saves a checkpoint and stops
    if int(os.environ.get("RANK", "0")) == 0:
        print(result)
    return 0
