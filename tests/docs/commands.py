"""Command lines of a page: a real shell says what they come to, and each program's own parser what it thinks of them.

The block runs in bash with programs of our own in front of PATH that take down their arguments and do nothing; so
quotes, variables, continued lines and loops mean what they mean. Each call is then checked in this process.
"""

import argparse
import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from packaging.requirements import InvalidRequirement, Requirement
from torch.distributed.run import get_args_parser

import vqclip.cli.options
from tests.docs.blocks import ROOT
from vqclip.cli.main import main

PROGRAMS = ("python", "python3", "torchrun", "vqclip", "make", "pip")
TINY = ("train.steps=2", "train.batch_size=8", "optim.warmup_steps=0", "data.workers=0", "evaluation=[]")
"""What a training is cut down to where a page has it run."""

_TAKE_DOWN = '#!/bin/sh\nprintf \'%s\\0\' "${0##*/}" "$@" >> "$CALLS"; printf \'\\n\\0\' >> "$CALLS"\n'
# Slurm's, as it would be on the first of two machines.
_SRUN = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'
_SCONTROL = "#!/bin/sh\necho node0; echo node1\n"
_SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NODEID": "0"}


class Parsed(BaseException):
    """The arguments were read without an error; what comes after them is not wanted."""


def calls_of(source: str, place: Path) -> list[list[str]]:
    """Every call of one of `PROGRAMS` that the lines come to when bash runs them in a folder.

    Raises:
        AssertionError: bash ended with an error; anything that is not of `PROGRAMS` has really run.
    """
    shims, calls = place / ".shims", place / ".calls"
    shims.mkdir(exist_ok=True)
    for name, text in {**dict.fromkeys(PROGRAMS, _TAKE_DOWN), "srun": _SRUN, "scontrol": _SCONTROL}.items():
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    calls.write_bytes(b"")
    environment = {"PATH": f"{shims}:/usr/bin:/bin", "CALLS": str(calls), "HOME": str(place), **_SLURM}
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", source],
        cwd=place, env=environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"bash ended with {done.returncode}:\n{done.stderr}"
    parts = calls.read_bytes().decode().split("\0")
    found: list[list[str]] = [[]]
    for part in parts[:-1]:
        if part == "\n":
            found.append([])
        else:
            found[-1].append(part)
    return found[:-1]


def check(call: list[str], run: bool = False) -> None:
    """Let the program that is called look at its arguments; with ``run`` also do what they say, on tiny data.

    Raises:
        AssertionError: it refuses them.
    """
    program, *arguments = call
    if program == "make":
        _check_make(arguments)
    elif program == "pip":
        _check_pip(arguments)
    elif program == "torchrun":
        _check_torchrun(arguments, run)
    elif program == "vqclip":
        _check_module("vqclip", arguments, run)
    elif arguments[0] == "-m":
        _check_module(arguments[1], arguments[2:], run)
    else:
        _check_script(Path(arguments[0]), arguments[1:], run)


def _check_make(arguments: list[str]) -> None:
    """The targets are there, and a training that they start has a configuration that can be used."""
    command = ["make", "-n", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if "/torchrun " in line:
            _check_torchrun(shlex.split(line)[1:], run=False)


def _check_pip(arguments: list[str]) -> None:
    """Of what is installed from here or from an index by our name, the extras are ours."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    ours = set(re.findall(r"^([a-z0-9-]+) = \[", section, re.MULTILINE))
    assert arguments[0] == "install", f"pip {arguments[0]}: expected pip install"
    for argument in arguments[1:]:
        if argument.startswith("-"):
            continue
        try:
            asked = Requirement(re.sub(r"^\.", "vqclip", argument)).extras
        except InvalidRequirement:  # a file, such as a wheel
            continue
        assert asked <= ours or not argument.startswith((".", "vqclip")), f"{argument}: expected extras of {ours}"


def _check_torchrun(arguments: list[str], run: bool) -> None:
    with _errors_shown("torchrun"):
        options = get_args_parser().parse_args(arguments)
    if options.module:
        _check_module(options.training_script, options.training_script_args, run)
    else:
        _check_script(Path(options.training_script), options.training_script_args, run)


def _check_module(module: str, arguments: list[str], run: bool) -> None:
    if module == "vqclip" and arguments[:1] == ["train"]:
        module, arguments = "vqclip.train", arguments[1:]
    if module == "vqclip.train":
        with _errors_shown(module):
            status = main(["train", *arguments, *(TINY if run else ["--print-config"])])
            assert status == 0, f"status {status}"
        return
    assert importlib.util.find_spec(module), f"{module}: no such module"
    with _as_main([module, *arguments], run):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _check_script(path: Path, arguments: list[str], run: bool) -> None:
    assert path.is_file(), f"{path}: no such file"
    with _as_main([str(path), *arguments], run), mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        runpy.run_path(str(path), run_name="__main__")


@contextlib.contextmanager
def _as_main(argv: list[str], run: bool) -> Iterator[None]:
    """For the main program of ``argv``, which ends where it has read its arguments, unless it is to run."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(sys, "argv", argv))
        patches.enter_context(_errors_shown(" ".join(argv)))
        if not run:
            patches.enter_context(_stopped_when_parsed())
        try:
            yield
        except Parsed:
            pass
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"status {ended.code}") from ended


@contextlib.contextmanager
def _stopped_when_parsed() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        parser, options = argparse.ArgumentParser, vqclip.cli.options
        for owner, name in ((parser, "parse_args"), (parser, "parse_intermixed_args"), (options, "read_options")):
            original = getattr(owner, name)

            def parse(*args: object, original=original, **options: object) -> None:
                original(*args, **options)
                raise Parsed

            patches.enter_context(mock.patch.object(owner, name, parse))
        yield


@contextlib.contextmanager
def _errors_shown(what: str) -> Iterator[None]:
    """What a program says on stderr is part of the assertion that fails."""
    said, out = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
            yield
    except (AssertionError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        raise AssertionError(f"{what}: {error}\n{said.getvalue()[-2000:]}") from error
