"""``vqclip train``, also ``python -m vqclip.train``: train a configuration."""

from __future__ import annotations

import json
import os
import time

from vqclip.cli.options import Command, LocalPath
from vqclip.config import did_you_mean, json_schema, suggest_keys, to_yaml
from vqclip.config.loading import read_file
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output

__all__ = ["Train"]

_TIME_TO_REPORT_S = 5.0
"""Wait before a process other than the first of its machine ends."""


class Train(
    Command,
    reads="changes to the file, such as optim.lr=1e-3",
    takes_others=True,
    failure=1,
    after_interrupt="what is not in a checkpoint is not kept",
    logs=True,
):
    """Train image and text tokenizers together.

    Examples:
      vqclip train --config configs/base.yaml run.name=mine optim.lr=1e-3
      torchrun --standalone --nproc-per-node 2 -m vqclip train --config configs/base.yaml
    """

    # torchrun takes options that begin like one of its own (--log..., --n..., --max...), so ours have other names.
    config: LocalPath | None = None
    """YAML file, such as configs/base.yaml."""
    print_config: bool = False
    """Print the resolved configuration and stop."""
    json_schema: bool = False
    """Print a JSON schema for editors and stop."""

    def run(self) -> int:
        """Train, or print the configuration or the schema.

        Returns:
            The exit status: 0 when the run is finished, or was stopped by a signal and can be resumed (`stopped.json`
            in its folder); 2 for an invalid configuration whose error another process reports. Other statuses: 1 for an
            error, 3 for a run that hung (`vqclip.process.watchdog`), 130 for Ctrl-C pressed twice, or before the
            process group exists.
        """
        if self.others:
            raise ConfigError(self._explain_option(self.others[0]))
        if self.json_schema:
            return self._print_schema()
        try:
            if self.config is not None:
                read_file(self.config, [])  # refused at once, without torch, if it cannot be read
            from vqclip import train
            from vqclip.train.tasks.kinds import load_task_config

            config = load_task_config(self.config, self.keys)
        except ConfigError as error:
            # All processes of a machine read the same file, so one of them reports the error. torchrun kills the others
            # as soon as the first process ends: they wait, so that the one that reports can finish.
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                if self.config is None and ": missing;" in str(error):
                    hint = "no --config given, so required sections are missing; for example --config configs/base.yaml"
                    raise ConfigError(f"{hint}\n{error}") from None
                raise
            time.sleep(_TIME_TO_REPORT_S)
            return 2
        if self.print_config:
            print_output(to_yaml(config).removesuffix("\n"))
            return 0
        result = train.run(config, owns_process=True)  # the first Ctrl-C is handled inside: it saves, and stops
        if int(os.environ.get("RANK", "0")) == 0:
            print(result)
        return 0

    def _print_schema(self) -> int:
        import functools
        import operator

        from vqclip.train.tasks.kinds import TASKS

        print_output(json.dumps(json_schema(functools.reduce(operator.or_, TASKS.values())), indent=2))
        return 0

    def _explain_option(self, option: str) -> str:
        """Return an error message that suggests keys: ``optim.lr=3`` for ``--lr=3`` and ``--lr 3``."""
        from vqclip.train import TrainConfig

        name, is_assigned, value = option.partition("=")
        if not is_assigned and option in self.given:
            after = self.given[self.given.index(option) + 1 :][:1]
            value = next((each for each in after if not each.startswith("-")), "")
        meant = [f"{path}={value or '...'}" for path in suggest_keys(TrainConfig, name.lstrip("-"))]
        hint = did_you_mean(meant) or "; --print-config lists all keys"
        return f"unknown option {option}: expected section.key=value{hint}"
