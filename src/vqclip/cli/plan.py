"""``vqclip plan``: say what a training step needs before it runs."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from vqclip.cli.options import Command, LocalPath
from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output

__all__ = ["Plan"]


class Plan(Command, words=("config",), reads="changes to it", failure=1):
    """Say what a training step needs before it runs: memory of a GPU by part, and bytes of every exchange.

    Needs neither a GPU nor the data nor other processes. ``vqclip data plan`` does the same for the data. Exit status:
    0 if the step fits, or without --memory; 1 if it does not, or for an error; 2 for an invalid configuration.

    Examples:
      vqclip plan configs/vit_b16.yaml train.batch_size=32768 --gpus 64 --memory 80
    """

    config: LocalPath
    """Training configuration, such as configs/vit_b16.yaml."""
    gpus: Annotated[int, Field(ge=1, le=2**20)] = 1
    """GPUs, and processes, of the job."""
    gpus_per_machine: Annotated[int, Field(ge=1, le=2**20)] = 8
    """GPUs of a machine, for train.parallel: hsdp."""
    memory: Annotated[float, Field(gt=0)] | None = None
    """GiB of a GPU; without it nothing is compared."""
    reserve: Annotated[float, Field(ge=0)] = 4.0
    """GiB for what is not counted."""
    json_: bool = False
    """Print the figures as JSON, in bytes."""

    def run(self) -> int:
        """Print the plan; the exit status is 0 if the step fits, 1 if it does not, 2 for a wrong configuration."""
        from vqclip.train.plan import plan_step
        from vqclip.train.tasks.kinds import load_task_config

        config = load_task_config(self.config, self.keys)
        limit = float("inf") if self.memory is None else (self.memory - self.reserve) * 2**30
        if limit <= 0:
            raise ConfigError(f"--memory: got {self.memory:g}, all of which --reserve {self.reserve:g} takes")
        gpu = None if config.run.device == "cpu" else int((self.memory or 80) * 2**30)
        machines = (self.gpus, self.gpus_per_machine, gpu)
        first = plan = plan_step(config, *machines)

        # What costs least comes first: rounding, exchanges, time, another result.
        sharded = "train.parallel=fsdp train.bucket_mb=null"
        tried = ["train.precision=bf16", sharded + (" train.compile=regional" if config.train.compile else "")]
        tried += ["train.activation_checkpointing=true"]
        tried += [
            f"train.micro_batches={config.train.micro_batches * 2**n}" for n in range(1, plan.samples.bit_length())
        ]
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

        if self.json_:
            known = {"samples": first.samples, "memory": first.parts, "peak": first.peak, "exchanges": first.exchanges}
            known |= {"fits": first.peak <= limit, "fits_with_changes": plan.peak <= limit}
            print_output(json.dumps(known | {"changes": [{"overrides": key, "peak": peak} for key, peak in changes]}))
            return 0 if first.peak <= limit else 1
        lines = [f"{first.samples:,} samples a process. Memory of a process at the peak of a step:", ""]
        lines += [f"  {name:28} {format_bytes(size, binary=True):>10}" for name, size in first.parts.items()]
        lines += [f"  {'together':28} {format_bytes(first.peak, binary=True):>10}", ""]
        if first.exchanges:
            lines += ["a process sends in a step:", ""]
            lines += [f"  {name:28} {format_bytes(size):>10}" for name, size in first.exchanges.items()]
            lines += [f"  {'together':28} {format_bytes(sum(first.exchanges.values())):>10}", ""]
        if self.memory is None:
            lines.append("give --memory to compare it with that of a GPU")
        else:
            verdict = "it fits" if first.peak <= limit else "it does not fit"
            lines.append(f"{verdict}: {self.memory:g} GiB, less {self.reserve:g} for what is not counted (--reserve)")
        if first.peak > limit:
            lines += ["", "what to change; each line includes the changes above it:", ""]
            lines += [f"  {key:52} {format_bytes(peak, binary=True):>10}" for key, peak in changes]
            lost = (
                "no setting that was tried makes it fit: use more GPUs, a smaller train.batch_size, or a smaller model"
            )
            lines += ["", "then it fits" if plan.peak <= limit else lost]
        print_output("\n".join(lines))
        return 0 if first.peak <= limit else 1
