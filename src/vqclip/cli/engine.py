"""Options of commands whose work runs in this job's processes or on Ray."""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.data.on_ray import RayOptions
from vqclip.errors import ConfigError

__all__ = ["add_engine", "ray_options"]


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` and the options of Ray."""
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this process, or those of torchrun. ray: workers of Ray, on this machine or on a cluster whose "
        "machines share the output folder (local)",
    )
    group = parser.add_argument_group("with --engine ray")
    for name, field in RayOptions.model_fields.items():
        kind = {"address": types.text, "actors": types.whole(1, 2**20), "gpus": _gpus}.get(name, _cpus)
        text = str(field.description).replace("%", "%%").rstrip(".")
        group.add_argument(f"--ray-{name}", type=kind, metavar="N" if name != "address" else "ADDRESS", help=text)


def ray_options(options: argparse.Namespace) -> RayOptions | None:
    """Return the options of Ray; None for the local engine.

    Raises:
        ConfigError: options of Ray for the local engine.
    """
    given = {name: getattr(options, f"ray_{name}") for name in RayOptions.model_fields}
    if options.engine == "ray":
        return RayOptions(**given)
    if names := [f"--ray-{name}" for name, value in given.items() if value is not None]:
        raise ConfigError(f"{', '.join(names)}: got the local engine; expected --engine ray with it")
    return None


def _cpus(given: str) -> float:
    number = _gpus(given)
    if number == 0:
        raise argparse.ArgumentTypeError("got 0, expected a positive number")
    return number


def _gpus(given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1024 or (number > 1 and number != int(number)):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number up to 1024, or one from 0 to 1")
    return number
