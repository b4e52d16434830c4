"""``vqclip data plan``: say what a run needs before it starts.

Whether the data fit the cache, whether an index is needed, and bytes and requests of an epoch, by formulas. The size of
the data comes from the index of SOURCE (vqclip data index), or from --samples, --shards and --bytes. With --config,
order, batch and cache are those of a training configuration, and key=value changes the configuration.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from vqclip.cli import arguments as types
from vqclip.cli.data_index import parse_tars
from vqclip.cli.data_pack import SOURCE_HELP
from vqclip.config import parse_config
from vqclip.data.order import FullOrder, WindowedOrder
from vqclip.data.tars.make import CHUNK
from vqclip.data.tars.open import choose_chunk
from vqclip.data_tools.plan import DataCounts, Job, Plan, count_source, make_plan
from vqclip.errors import ConfigError, name_section
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data plan --samples 1.3e9 --shards 130000 --bytes 10e12 --nodes 64 --gpus 8 --batch 32768
  vqclip data plan s3://bucket/shards --nodes 4 --gpus 8 --batch 16384
  vqclip data plan --config configs/vit_b16.yaml --nodes 2 --gpus 8 data.order=windowed
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add(
        "given",
        nargs="*",
        metavar="SOURCE key=value",
        help=f"{SOURCE_HELP}, and its keys; with --config: keys of the configuration",
    )
    add("--config", type=types.path, metavar="FILE", help="training configuration")
    add("--samples", type=_number, metavar="N", help="samples of the data, instead of SOURCE")
    add("--shards", type=_number, metavar="N", help="shards of the data, beside --samples")
    add("--bytes", type=_number, metavar="N", help="bytes of all shards, beside --samples")
    add("--nodes", type=types.whole(1, 100_000), default=1, help="machines (%(default)s)")
    add("--gpus", type=types.whole(1, 1024), default=1, help="GPUs, and processes, of a machine (%(default)s)")
    add("--batch", type=types.count, metavar="N", help="samples of a global batch, without --config")
    add("--rate", type=types.positive, default=1000.0, metavar="N", help="images a second and GPU (%(default)g)")
    add("--order", choices=("full", "windowed"), help="order of the samples, without --config (windowed)")
    for name, schema in (("chunk", WindowedOrder), ("window", WindowedOrder)):
        field = schema.model_fields[name]
        add(f"--{name}", type=types.count, metavar="N", help=f"of the windowed order ({field.default})")
    add("--cache-gib", type=types.positive, metavar="N", help="remote.cache_gib of a source without --config (100)")
    help_text = "MB a second that a machine can read; unknown without it"
    add("--bandwidth", type=types.positive, metavar="MB/S", help=help_text)
    add("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    data, job = _of_config(options) if options.config else _of_options(options)
    plan = make_plan(data, job)
    if options.json:
        print_output(json.dumps(plan._asdict(), indent=1))
        return
    lines = [f"{name:18} {text}" for name, text in _figures(plan, job).items()]
    print_output("\n".join([*lines, "", *(plan.advice or ["it fits"])]))


def _of_options(options: argparse.Namespace) -> tuple[list[DataCounts], Job]:
    if options.batch is None:
        raise ConfigError("--batch: got nothing; expected the samples of a global batch, or --config")
    given = {name: getattr(options, name) for name in ("chunk", "window") if getattr(options, name) is not None}
    if options.order == "full" and given:
        raise ConfigError(f"--{next(iter(given))}: got it beside --order full, which has no chunks")
    order = FullOrder() if options.order == "full" else parse_config(WindowedOrder, given, (), "--order windowed")
    cache = {} if options.cache_gib is None else {"cache_gib": options.cache_gib}
    job = Job(options.batch, order=order, **_of_machines(options), **cache)
    if options.given:
        path, *overrides = options.given
        _refuse(options, "samples", "shards", "bytes", beside="SOURCE")
        return [count_source(parse_tars(path, overrides), _index_chunk(job))], job
    return [_given_counts(options, job)], job


def _of_config(options: argparse.Namespace) -> tuple[list[DataCounts], Job]:
    from vqclip.data_tools.model_inputs import ModelInputs  # here, as it imports the training code

    _refuse(options, "batch", "order", "chunk", "window", "cache_gib", beside="--config")
    inputs = ModelInputs.load(options.config, options.given)
    data, sources = inputs.config.data, inputs.config.data.sources
    limits = [each.remote.cache_gib for each in sources if hasattr(each, "remote")]
    job = Job(
        inputs.config.train.batch_size,
        order=data.order,
        cache_gib=min(limits, default=Job.cache_gib),
        seed=inputs.config.run.seed,
        **_of_machines(options),
    )
    if options.samples is not None:
        return [_given_counts(options, job)], job
    _refuse(options, "shards", "bytes", beside="--config")
    counts = []
    for number, source in enumerate(sources):
        with name_section(f"data.sources[{number}]"):
            counts.append(count_source(source, _index_chunk(job)))
    return counts, job


def _of_machines(options: argparse.Namespace) -> dict[str, Any]:
    bandwidth = None if options.bandwidth is None else options.bandwidth * 1e6
    return {"nodes": options.nodes, "gpus": options.gpus, "rate": options.rate, "bandwidth": bandwidth}


def _refuse(options: argparse.Namespace, *names: str, beside: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: got it beside {beside}, which has its own; expected one")


def _given_counts(options: argparse.Namespace, job: Job) -> DataCounts:
    missing = [f"--{name}" for name in ("samples", "shards", "bytes") if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"{missing[0]}: got nothing; expected SOURCE, or all of --samples, --shards and --bytes")
    return DataCounts(options.samples, options.shards, options.bytes, _index_chunk(job))


def _index_chunk(job: Job) -> int:
    """Return the samples of a chunk of an index that is still to be made."""
    return choose_chunk(job.order.chunk) if isinstance(job.order, WindowedOrder) else CHUNK


def _figures(plan: Plan, job: Job) -> dict[str, str]:
    size, limit = format_bytes, f"remote.cache_gib={job.cache_gib:g}"
    return {
        "samples": f"{plan.samples:,} in {plan.shards:,} shards",
        "bytes": f"{size(plan.bytes)}, {size(plan.bytes / plan.samples)} a sample",
        "order": plan.order,
        "index": f"{size(plan.index_bytes)}, shared by the processes of a machine",
        "cache of a machine": f"{size(plan.cache_bytes)} of {size(plan.cache_limit)} ({limit})",
        "steps an epoch": f"{plan.epoch_steps:,.1f}",
        "hours an epoch": f"{plan.epoch_s / 3600:,.2f}, at {job.rate:,g} images a second and GPU",
        "bytes an epoch": f"{size(plan.epoch_bytes)}, {size(plan.node_bytes_s)} a second and machine",
        "requests an epoch": f"{plan.epoch_requests:,.0f}",
    }


def _number(given: str) -> int:
    """Convert a whole number of at least 1, also written as 1.3e9."""
    try:
        number = float(given)
        assert number == int(number) >= 1
    except (ValueError, OverflowError, AssertionError):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number from 1, such as 1.3e9") from None
    return int(number)
