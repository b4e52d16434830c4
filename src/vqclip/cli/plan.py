"""``vqclip plan``: say what a run needs before it starts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from vqclip.cli.options import SOURCE, SOURCE_KEYS, Command, LocalPath, Text
from vqclip.config import load_config
from vqclip.config.explain import require_known_keys
from vqclip.errors import ConfigError, DataError, name_section
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    from vqclip.data import SourceConfigBase
    from vqclip.train.config import TaskConfig


def _require_whole(given: float) -> int:
    if not 1 <= given < float("inf") or given != int(given):
        raise ValueError("expected a whole number from 1, such as 1.3e9")
    return int(given)


Total = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_require_whole)]
"""A large whole number, such as 1.3e9."""


class Plan(Command, words=("source",), reads=f"changes to the configuration; without one, {SOURCE_KEYS}", failure=1):
    """Say what a run needs before it starts, without a GPU, other processes or reading a sample.

    Of a configuration: the memory of a GPU by part, the bytes of every exchange, and what its data need. Of data:
    whether they fit the cache of a machine, whether an index is needed, and bytes and requests of an epoch, under
    either order; their size comes from their index (vqclip data index), or from --samples, --shards and --bytes. Exit
    status: 0 if the step fits, or without --memory; 1 if it does not, or for an error; 2 for an invalid configuration.

    Examples:
      vqclip plan configs/vit_b16.yaml train.batch_size=32768 --gpus 64 --memory 80
      vqclip plan s3://bucket/shards remote.cache_gib=500 --machines 4
      vqclip plan --samples 1.3e9 --shards 130000 --bytes 10e12 --machines 64
    """

    source: Text | None = Field(None, description=f"configuration, such as configs/vit_b16.yaml; or {SOURCE}: tars")
    config: LocalPath | None = None
    """The configuration; --config need not be written before a YAML file."""
    gpus: Annotated[int, Field(ge=1, le=2**20)] = 1
    """GPUs, and processes, of the job."""
    gpus_per_machine: Annotated[int, Field(ge=1, le=2**20)] = 8
    """GPUs of a machine."""
    memory: Annotated[float, Field(gt=0)] | None = None
    """GiB of a GPU; without it nothing is compared."""
    reserve: Annotated[float, Field(ge=0)] = 4.0
    """GiB for what is not counted."""
    machines: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Machines; those of --gpus without it."""
    samples: Total | None = None
    """Samples of the data, with --shards and --bytes in place of an index; 1.3e9 is a number."""
    shards: Total | None = None
    """Their shards."""
    bytes: Total | None = None
    """Their size."""
    json_: bool = False
    """Print the figures as JSON, in bytes."""

    def run(self) -> int:
        """Print the plan; the exit status is 0 if the step fits, 1 if it does not, 2 for a wrong configuration."""
        if self.config is not None:
            require_known_keys(self.config, self.keys)  # before torch is imported
        from vqclip.data_tools.plan import format_plan

        if self.config is None:
            plan = self._plan_data(None)
            print_output(json.dumps(plan, indent=1) if self.json_ else format_plan(plan), for_programs=self.json_)
            return 0
        from vqclip.train.tasks.kinds import load_task_config

        config = load_task_config(self.config, self.keys)
        with contextlib.suppress(DataError):  # said below
            config = config.fit()
        status, figures, lines = self._plan_step(config)
        try:
            figures["data"] = self._plan_data(config)
            lines += ["", "The data:", "", format_plan(figures["data"])]
        except DataError as error:
            lines += ["", f"The data are not counted: {error}"]
        print_output(json.dumps(figures) if self.json_ else "\n".join(lines), for_programs=self.json_)
        return status

    def _plan_data(self, config: TaskConfig | None) -> dict[str, Any]:
        """Return the needs of the data of a configuration, or of SOURCE; see `vqclip.data_tools.plan.make_plan`."""
        from vqclip.cli.data import parse_tars
        from vqclip.data.order import WindowedOrder
        from vqclip.data.remote.retry import RemoteConfig
        from vqclip.data.tars.make import CHUNK
        from vqclip.data.tars.open import choose_chunk
        from vqclip.data_tools.plan import DataCounts, count_source, make_plan

        order = None if config is None or not isinstance(config.data.order, WindowedOrder) else config.data.order
        numbers = [int(each) for each in (self.samples, self.shards, self.bytes) if each is not None]
        if numbers and (len(numbers) < 3 or self.source is not None):
            raise ConfigError("got some of --samples, --shards and --bytes; expected all of them, without SOURCE")
        if config is None and self.source is None and not numbers:
            raise ConfigError(
                "got no SOURCE; expected one, or a configuration, or all of --samples, --shards and --bytes"
            )
        sources: list[SourceConfigBase] = [] if config is None else [*config.data.sources]
        if self.source is not None:
            sources = [parse_tars(self.source, self.keys)]
        chunk = CHUNK if order is None else choose_chunk(order.chunk)
        counts = [DataCounts(numbers[0], numbers[1], numbers[2], chunk)] if numbers else []
        for number, source in enumerate(() if numbers else sources):
            with name_section(f"data.sources[{number}]" if config is not None else "SOURCE"):
                counts.append(count_source(source))
        limits = [each.remote.cache_gib for each in sources if hasattr(each, "remote")]
        machines = self.machines or -(-self.gpus // self.gpus_per_machine)
        return make_plan(counts, order, machines, min(limits, default=RemoteConfig().cache_gib))

    def _plan_step(self, config: TaskConfig) -> tuple[int, dict[str, Any], list[str]]:
        """Return the exit status, the figures of a step, and the lines that show them."""
        from vqclip.train.plan import plan_step

        limit = float("inf") if self.memory is None else (self.memory - self.reserve) * 2**30
        if limit <= 0:
            raise ConfigError(f"--memory: got {self.memory:g}, all of which --reserve {self.reserve:g} takes")
        gpu = None if config.run.device == "cpu" else int((self.memory or 80) * 2**30)
        machines = (self.gpus, self.gpus_per_machine, gpu)
        first = plan = plan_step(config, *machines)

        # What costs least comes first: rounding, exchanges, time, another result.
        sharded = "train.parallel=fsdp train.bucket_mb=null"
        halves = [config.train.micro_batches * 2**n for n in range(1, plan.samples.bit_length())]
        tried = ["train.precision=bf16", sharded + (" train.compile=regional" if config.train.compile else "")]
        tried += ["train.activation_checkpointing=true", *(f"train.micro_batches={count}" for count in halves)]
        changes = dict[str, int]()
        for change in [*tried, "loss.impl=ring", "train.ema=null"]:
            if plan.peak <= limit:
                break
            with contextlib.suppress(ConfigError):  # such as more microbatches than samples
                changed = load_config(type(config), config, change.split())
                found = plan_step(changed, *machines)
                if found.peak < 0.95 * plan.peak:
                    config, plan, changes[change] = changed, found, found.peak

        figures = {"samples": first.samples, "memory": first.parts, "peak": first.peak, "exchanges": first.exchanges}
        figures |= {"fits": first.peak <= limit, "fits_with_changes": plan.peak <= limit}
        figures["changes"] = [{"overrides": key, "peak": peak} for key, peak in changes.items()]
        lines = [f"{first.samples:,} samples a process. Memory of a process at the peak of a step:", ""]
        lines += [*_rows(first.parts | {"together": first.peak}, binary=True), ""]
        if sent := first.exchanges:
            lines += ["a process sends in a step:", "", *_rows(sent | {"together": sum(sent.values())}), ""]
        if self.memory is None:
            lines.append("give --memory to compare it with that of a GPU")
        else:
            verdict = "it fits" if first.peak <= limit else "it does not fit"
            lines.append(f"{verdict}: {self.memory:g} GiB, less {self.reserve:g} for what is not counted (--reserve)")
        if first.peak > limit:
            lines += ["", "what to change; each line includes the changes above it:", ""]
            lost = (
                "no setting that was tried makes it fit: use more GPUs, a smaller train.batch_size, or a smaller model"
            )
            lines += [*_rows(changes, 52, binary=True), "", "then it fits" if plan.peak <= limit else lost]
        return 0 if first.peak <= limit else 1, figures, lines


def _rows(sizes: Mapping[str, int], width: int = 28, binary: bool = False) -> list[str]:
    """Return a line for each size in bytes, by its name."""
    return [f"  {name:{width}} {format_bytes(size, binary=binary):>10}" for name, size in sizes.items()]
