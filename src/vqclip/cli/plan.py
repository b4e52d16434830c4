"""``vqclip plan``: say what a training step needs before it runs."""

from __future__ import annotations

import argparse
import json

from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output
from vqclip.train.plan import plan_step
from vqclip.train.tasks.kinds import load_task_config

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the plan; the exit status is 0 if the step fits, 1 if it does not, 2 for a wrong configuration."""
    config = load_task_config(options.config, options.overrides)
    limit = float("inf") if options.memory is None else (options.memory - options.reserve) * 2**30
    if limit <= 0:
        raise ConfigError(f"--memory: got {options.memory:g}, all of which --reserve {options.reserve:g} takes")
    gpu = None if config.run.device == "cpu" else int((options.memory or 80) * 2**30)
    machines = (options.gpus, options.gpus_per_machine, gpu)
    first = plan = plan_step(config, *machines)

    # What costs least comes first: rounding, exchanges, time, another result.
    sharded = "train.parallel=fsdp train.bucket_mb=null"
    tried = ["train.precision=bf16", sharded + (" train.compile=regional" if config.train.compile else "")]
    tried += ["train.activation_checkpointing=true"]
    tried += [f"train.micro_batches={config.train.micro_batches * 2**n}" for n in range(1, plan.samples.bit_length())]
    tried += ["loss.impl=ring", "train.ema=null"]
    changes = list[tuple[str, int]]()
    while plan.peak > limit and tried:
        try:
            changed = load_config(type(config), config, tried[0].split())
            found = plan_step(changed, *machines)
            if found.peak < 0.95 * plan.peak:
                config, plan = changed, found
                changes.append((tried[0], found.peak))
        except ConfigError:  # such as more microbatches than samples
            pass
        del tried[0]

    if options.json:
        known = {"samples": first.samples, "memory": first.parts, "peak": first.peak, "exchanges": first.exchanges}
        known |= {"fits": first.peak <= limit, "fits_with_changes": plan.peak <= limit}
        print_output(json.dumps(known | {"changes": [{"overrides": key, "peak": peak} for key, peak in changes]}))
        return 0 if first.peak <= limit else 1
    lines = [f"{first.samples:,} samples a process. Memory of a process at the peak of a step:", ""]
    lines += [f"  {name:28} {_size(size):>10}" for name, size in first.parts.items()]
    lines += [f"  {'together':28} {_size(first.peak):>10}", ""]
    if first.exchanges:
        lines += ["a process sends in a step:", ""]
        lines += [f"  {name:28} {format_bytes(size):>10}" for name, size in first.exchanges.items()]
        lines += [f"  {'together':28} {format_bytes(sum(first.exchanges.values())):>10}", ""]
    if options.memory is None:
        lines.append("give --memory to compare it with that of a GPU")
    else:
        verdict = "it fits" if first.peak <= limit else "it does not fit"
        lines.append(f"{verdict}: {options.memory:g} GiB, less {options.reserve:g} for what is not counted (--reserve)")
    if first.peak > limit:
        lines += ["", "what to change; each line includes the changes above it:", ""]
        lines += [f"  {key:52} {_size(peak):>10}" for key, peak in changes]
        lost = "no setting that was tried makes it fit: use more GPUs, a smaller train.batch_size, or a smaller model"
        lines += ["", "then it fits" if plan.peak <= limit else lost]
    print_output("\n".join(lines))
    return 0 if first.peak <= limit else 1


def _size(number: int) -> str:
    return format_bytes(number, binary=True)
