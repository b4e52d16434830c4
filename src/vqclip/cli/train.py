"""``vqclip train``, also ``python -m vqclip.train``: train a configuration, or on data by their path."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
import time
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from vqclip.cli.options import SOURCE, Command, LocalPath, Text, local_path
from vqclip.config import did_you_mean, json_schema
from vqclip.config.explain import commented_yaml, explain, key_paths, require_known_keys
from vqclip.config.loading import packaged_file, read_file
from vqclip.config.messages import suggest_keys
from vqclip.errors import ConfigError, DataError, name_section
from vqclip.runlog.console import fit_lines, print_output

if TYPE_CHECKING:
    from vqclip.data import SourceConfigBase
    from vqclip.train.config import TaskConfig

_TIME_TO_REPORT_S = 5.0
"""Wait before a process other than the first of its machine ends."""
_HELD_OUT, _PASSES = 0.1, 10
"""Without --val: share of the samples that are held out. Smallest number of passes through the data."""
_DULL = ("train", "training", "images", "data", "metadata", "captions", "shards")
"""Names of folders and files that do not tell one set of images from another."""

logger = logging.getLogger(__name__)


class Train(
    Command,
    words=("source",),
    reads="changes to the configuration, such as optim.lr=1e-3, and keys of SOURCE, such as captions=title",
    takes_others=True,
    failure=1,
    after_interrupt="what is not in a checkpoint is not kept",
):
    """Train image and text tokenizers together, on your own data or as a configuration says.

    Given data, it trains heads on two small pretrained towers where vqclip[small-towers] is installed
    (configs/pretrained.yaml), and everything from nothing otherwise (configs/captions.yaml). Without --val a tenth of
    the samples is held out for the evaluation, by a hash of their names.

    Examples:
      vqclip train photos/
      vqclip train photos.csv captions=title --val others.csv run.name=mine
      vqclip train configs/base.yaml optim.lr=1e-3
      torchrun --standalone --nproc-per-node 2 -m vqclip train configs/base.yaml
    """

    # torchrun takes options that begin like one of its own (--log..., --n..., --max...), so ours have other names.
    source: Text | None = Field(None, description=f"{SOURCE} to train on; or a YAML file, such as configs/base.yaml")
    val: Text | None = None
    """With data: others, to evaluate on, in place of a held-out part."""
    config: LocalPath | None = None
    """The YAML file; --config need not be written."""
    print_config: bool = False
    """Print the resolved configuration, each key below its description, and stop."""
    explain: Text | None = None
    """Print what a key such as optim.lr is, or all keys of a section such as optim, and stop."""
    json_schema: bool = False
    """Print a JSON schema for editors and stop."""

    def run(self) -> int:
        """Train, or print the configuration or the schema.

        Returns:
            The exit status: 0 when the run is finished, or was stopped by a scheduler's signal and can be resumed
            (`stopped.json` in its folder); 130 for Ctrl-C; 2 for an invalid configuration whose error another process
            reports. Other statuses: 1 for an error, 3 for a run that hung (`vqclip.process.watchdog`).
        """
        if self.others:
            raise ConfigError(self._explain_option(self.others[0]))
        if self.explain is not None:
            print_output(explain(self.explain))
            return 0
        if self.json_schema:
            from vqclip.train.tasks.kinds import TASKS

            print_output(json.dumps(json_schema(reduce(or_, TASKS.values())), indent=2), for_programs=True)
            return 0
        try:
            config = self._load()
        except (ConfigError, DataError) as error:
            # All processes of a machine read the same files, so one of them reports the error. torchrun kills the
            # others as soon as the first process ends: they wait, so that the one that reports can finish.
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                raise
            time.sleep(_TIME_TO_REPORT_S)
            if isinstance(error, DataError):  # torchrun has not ended this process: it may be the only one with it
                raise
            return 2
        if self.print_config:
            try:
                config = config.fit()
            except DataError as error:
                logger.warning("what follows from the number of samples is left out: %s", error)
            print_output(commented_yaml(config).removesuffix("\n"), for_programs=True)
            return 0
        from vqclip import train
        from vqclip.data.sources.kinds import is_source_key

        result = train.run(config, owns_process=True)  # the first Ctrl-C is handled inside: it saves, and stops
        if int(os.environ.get("RANK", "0")) == 0:
            print(fit_lines(str(result)))
            if not result.finished and "RANK" not in os.environ:
                print(f"\n  {shlex.join(['vqclip', 'train', *self.given])}")
            elif result.finished and self.source is not None:
                data = [self.source, *(key for key in self.keys if is_source_key(key))]
                split = getattr(result.config.data.sources[0], "split", None)
                if split and not any(key.startswith("split=") for key in data):
                    data.append(f"split={split}")
                words = ["--tokenizer", str(result.folder), "--data", *data, "--out", f"tokens/{result.folder.name}"]
                print(f"  ids of all  {shlex.join(['vqclip', 'tokenize', *words])}")
        return 130 if result.stopped == "SIGINT" else 0

    def _load(self) -> TaskConfig:
        """Return the configuration: of the file, or for the data, after opening these.

        Raises:
            ConfigError: neither a file nor data are given, or both; or they are wrong.
            DataError: the data cannot be used.
        """
        if (self.source is None) == (self.config is None):
            got = "neither" if self.config is None else f"{self.source} and {self.config}"
            raise ConfigError(f"got {got}; expected data or a configuration, such as photos/ or configs/base.yaml")
        if self.config is not None:
            if self.val is not None:
                raise ConfigError("--val: got it with a configuration, which has its own `evaluation`; expected data")
            require_known_keys(self.config, self.keys)  # before torch is imported
        is_kind_given = any(key.startswith("kind=") for key in self.keys)  # the path may be a name on a hub
        for given in filter(None, (self.source, self.val)):
            path = Path(given).expanduser()
            if not (is_kind_given or path.exists() or re.search(r"[{*?\[]|://|^kind=", given)):
                there = [each.name for each in path.parent.glob("*")]
                close = did_you_mean(difflib.get_close_matches(path.name, there, n=1))
                raise DataError(f"{path.absolute()}: no such file or folder; expected a data set{close}")
        logger.info("vqclip train: loading PyTorch")
        from vqclip.train.tasks.kinds import load_task_config

        if self.config is not None:
            return load_task_config(self.config, self.keys)
        return load_task_config(*self._choose(str(self.source)))

    def _choose(self, path: str) -> tuple[dict[str, Any], list[str]]:
        """Choose a configuration for data, say which, and return it with the changes to it."""
        from vqclip.data import DataConfig, open_source
        from vqclip.data.held_out import PartOfSource
        from vqclip.towers.weights import has_small_towers

        if (Path(path).expanduser() / "config.yaml").is_file():
            raise ConfigError(f"{path}: the folder of a run; expected data, or its configuration: {path}/config.yaml")
        given, keys = self._parse(path)
        data = DataConfig(sources=(given,))  # which chooses a split, where there are several
        (source,) = (each.model_dump(mode="json", exclude_unset=True) for each in data.sources)
        opened = open_source(data.sources[0], path)
        trained = opened if self.val else PartOfSource(opened, _HELD_OUT, held_out=False)
        has_prompts, name = bool(opened.templates), _name_of(path)
        what = "labelled images" if has_prompts else "pairs"
        evaluation: dict[str, Any] = {"kind": "zero_shot" if has_prompts else "retrieval", "name": f"held-out {what}"}
        if self.val is None:
            evaluation |= {"data": source, "held_out": _HELD_OUT, "limit": 2000}
        else:
            with name_section("--val"):
                others = self._parse(self.val, like=given)[0]
            if others.model_dump(exclude={"where", "weight"}) == data.sources[0].model_dump(
                exclude={"where", "weight"}
            ):
                raise ConfigError(
                    f"--val: got {self.val}, the data to train on; expected others. Without --val a tenth is held out"
                )
            evaluation["data"] = others.model_dump(mode="json", exclude_unset=True)
        is_pretrained = has_small_towers()
        file = f"configs/{'pretrained' if is_pretrained else 'captions'}.yaml"
        tree, _ = read_file(packaged_file(file), [])
        tree["run"] = {"name": name}
        tree["data"] |= {"sources": [source]} | ({} if self.val else {"held_out": _HELD_OUT})
        tree["evaluation"] = [evaluation]
        schedule = tree["train"]
        if "batch_size" in schedule:
            schedule["batch_size"] = size = min(schedule["batch_size"], len(trained))
            schedule["steps"] = max(schedule["steps"], -(-_PASSES * len(trained) // size))
        steps = [key.partition("=")[2] for key in keys if key.startswith("train.steps=")]
        if steps and steps[-1].isdecimal() and "warmup_steps" in tree["optim"]:
            tree["optim"]["warmup_steps"] = min(tree["optim"]["warmup_steps"], int(steps[-1]) // 10)
        why = "vqclip[small-towers] is installed" if is_pretrained else "vqclip[small-towers] is not installed"
        towers = "two pretrained towers" if is_pretrained else "nothing is pretrained"
        apart = f"evaluated on {self.val}" if self.val else f"{len(opened) - len(trained):,} of them held out"
        few = ", ".join(opened.classnames[:3]) + (", ..." if len(opened.classnames) > 3 else "")
        classes = f" of {len(opened.classnames):,} classes: {few}" if has_prompts else ""
        logger.info("%s: %s %s (%s)%s; %s", path, f"{len(opened):,}", what, given.kind, classes, apart)
        logger.info("%s, as %s: %s; --print-config shows all of it", towers, why, file)
        return tree, keys

    def _parse(self, path: str, like: SourceConfigBase | None = None) -> tuple[SourceConfigBase, list[str]]:
        """Return the source at a path with its keys, and the keys of the configuration.

        Args:
            path: of the source.
            like: that of the data to train on; other data of the same kind have its keys, but for a choice of samples.
        """
        from vqclip.data import parse_source
        from vqclip.data.sources.kinds import is_source_key

        kept = mine = [key for key in self.keys if is_source_key(key)]
        place = local_path(path) or path  # whole, so that other commands find the data of the run from any folder
        if like is not None:
            kept = [key for key in mine if not key.startswith(("split", "where", "weight"))]
            if (
                not any(key.startswith("kind=") for key in mine)
                and (other := parse_source(place, ())).kind != like.kind
            ):
                if kept:
                    logger.info("--val: %s is of kind %s, and read without %s", path, other.kind, " ".join(kept))
                kept = []
        return parse_source(place, kept), [key for key in self.keys if key not in mine]

    def _explain_option(self, option: str) -> str:
        """Return an error message that suggests keys: ``optim.lr=3`` for ``--lr=3`` and ``--lr 3``."""
        name, is_assigned, value = option.partition("=")
        if not is_assigned and option in self.given:
            after = self.given[self.given.index(option) + 1 :][:1]
            value = next((each for each in after if not each.startswith("-")), "")
        meant = [f"{path}={value or '...'}" for path in suggest_keys(key_paths(), name.lstrip("-"))]
        hint = did_you_mean(meant) or "; --print-config lists all keys"
        return f"unknown option {option}: expected section.key=value{hint}"


def _name_of(path: str) -> str:
    """Return the name of a run on the data at a path: the last part of it that tells data apart."""
    parts = [re.sub(r"(\.\w{1,7})+$", "", part) for part in path.partition("://")[2 if "://" in path else 0].split("/")]
    parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-._") for part in parts if not re.search(r"[{}*?]", part)]
    named = [part for part in parts if part]
    return next((part for part in reversed(named) if part.lower() not in _DULL), named[-1] if named else "mine")
