"""``vqclip plan``: say what a training step needs before it runs: memory of a GPU by part, and bytes of every exchange.

The step runs without data and on tensors without memory, so neither a GPU nor the other processes are needed.
``vqclip data plan`` does the same for the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.errors import ConfigError
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output
from vqclip.train.config import TaskConfig
from vqclip.train.planning import Change, Machines, StepPlan, advise, plan_step
from vqclip.train.tasks.kinds import load_task_config

__all__ = ["main"]

_EXAMPLES = """\
examples:
  vqclip plan configs/vit_b16.yaml --gpus 64 --memory 80
  vqclip plan configs/vit_b16.yaml train.batch_size=32768 train.micro_batches=4 --gpus 64 --memory 80 --json

exit status: 0 if the step fits, or without --memory; 1 if it does not, or for an error; 2 for an invalid configuration
"""
_GIB = 2**30
_USUAL = 80
"""GiB of a GPU that is assumed without ``--memory``."""


@command("vqclip plan", failure=1)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 if the step fits, 1 if it does not, 2 for a wrong configuration."""
    options = _parser().parse_intermixed_args(arguments)
    config = load_task_config(options.config, options.overrides)
    limit = None if options.memory is None else int((options.memory - options.reserve) * _GIB)
    if limit is not None and limit <= 0:
        raise ConfigError(
            f"--memory: got {options.memory:g} GiB, all of which --reserve takes; expected more than "
            f"{options.reserve:g} GiB, or a smaller --reserve"
        )
    gpu = None if config.run.device == "cpu" else int((options.memory or _USUAL) * _GIB)
    machines = Machines(options.gpus, options.gpus_per_machine, gpu)
    plan = plan_step(config, machines)
    fits = limit is None or plan.peak <= limit
    changes = [] if limit is None else list(advise(config, machines, plan, limit))
    end_fits = fits or (bool(changes) and limit is not None and changes[-1].plan.peak <= limit)
    if options.json:
        print_output(json.dumps(_as_json(plan, fits, changes, end_fits), indent=1))
    else:
        print_output("\n".join([*_lines(config, plan), *_verdict(plan, options, changes, end_fits)]))
    return 0 if fits else 1


def _lines(config: TaskConfig, plan: StepPlan) -> list[str]:
    """Return the table of memory and that of exchanges."""
    lines = [f"{plan.samples:,} samples a process. Memory of a process at the peak of a step:", ""]
    lines += [f"  {name:28} {_size(size):>10}" for name, size in plan.parts.items()]
    lines += [f"  {'together':28} {_size(plan.peak):>10}", ""]
    if plan.exchanges:
        lines += ["exchanges of a step:", "", f"  {'':28} {'calls':>6} {'whole':>10} {'sent':>10}"]
        for name, each in plan.exchanges.items():
            lines.append(f"  {name:28} {each.calls:6,} {format_bytes(each.size):>10} {format_bytes(each.sent):>10}")
        sent = sum(each.sent for each in plan.exchanges.values())
        lines += [f"  {'together':28} {'':6} {'':10} {format_bytes(sent):>10}", ""]
    if config.train.compile:
        lines += ["train.compile: the plan is of a step that is not compiled; a compiled one usually stores less", ""]
    return lines


def _size(number: int) -> str:
    return format_bytes(number, binary=True)


def _verdict(plan: StepPlan, options: argparse.Namespace, changes: list[Change], end_fits: bool) -> list[str]:
    """Return whether the step fits, and what to change if not."""
    if options.memory is None:
        return ["give --memory to compare it with that of a GPU"]
    peak, given = f"the step takes {_size(plan.peak)}", f"--memory is {options.memory:g} GiB"
    limit = f"{peak}; {given}, and --reserve keeps {options.reserve:g} GiB of it for what is not counted"
    if not changes and end_fits:
        return [f"it fits: {limit}"]
    lines = [f"it does not fit: {limit}"]
    if changes:
        lines += ["", "what to change; each line includes the changes above it:", ""]
        lines += [f"  {' '.join(each.overrides):52} {_size(each.plan.peak):>10}" for each in changes]
    if end_fits:
        lines += ["", "then it fits"]
    else:
        lines += [
            "",
            "no setting that was tried makes it fit: use more GPUs, a smaller train.batch_size, or a smaller model",
        ]
    return lines


def _as_json(plan: StepPlan, fits: bool, changes: list[Change], end_fits: bool) -> dict[str, Any]:
    return {
        "samples": plan.samples,
        "memory": plan.parts,
        "peak": plan.peak,
        "exchanges": {name: each._asdict() for name, each in plan.exchanges.items()},
        "fits": fits,
        "changes": [{"overrides": each.overrides, "peak": each.plan.peak} for each in changes],
        "fits_with_changes": end_fits,
    }


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip plan",
        description=str(__doc__).partition(": ")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", type=types.path, metavar="CONFIG", help="training configuration, such as configs/vit_b16.yaml")
    add("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    add(
        "--gpus",
        type=types.whole(1, 2**20),
        default=1,
        metavar="N",
        help="GPUs, and processes, of the job (%(default)s)",
    )
    add(
        "--gpus-per-machine",
        type=types.whole(1, 1024),
        default=8,
        metavar="N",
        help="GPUs of a machine, for train.parallel: hsdp (%(default)s)",
    )
    help_text = f"memory of a GPU in GiB; without it nothing is compared, and the GPU is taken to have {_USUAL} GiB"
    add("--memory", type=types.positive, metavar="GIB", help=help_text)
    help_text = "GiB of it for what is not counted (%(default)g)"
    add("--reserve", type=types.not_negative, default=4.0, metavar="GIB", help=help_text)
    add("--json", action="store_true", help="print the figures as JSON, in bytes")
    return parser
