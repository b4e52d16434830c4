"""Errors that vqclip raises on purpose; `VqclipError` is the root of them all."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any


def printable(text: str, *, one_line: bool = False) -> str:
    """Escape a text of unknown origin, so that it can be written to a terminal or a log.

    Control characters, marks that change the direction of writing, lone surrogates and other unprintable characters
    become Python escapes.

    Args:
        text: any text.
        one_line: escape line breaks too; a name with a line break could otherwise look like a line of the program.
    """
    if text.isprintable():
        return text
    kept = "" if one_line else "\n"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def count_noun(number: float, noun: str) -> str:
    """Return a number with its noun: ``1 token``, ``3,000 tokens``."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def encodable(text: str) -> str:
    """Return a text that UTF-8, JSON and Parquet can hold: bytes of a name that are not UTF-8 become Python escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def quote_names(names: Iterable[object]) -> str:
    """Return names of unknown origin for a message: the first 20 in quotes, each of at most 80 characters."""
    return ", ".join(repr(str(name)[:80]) for name in itertools.islice(names, 20))


class VqclipError(Exception):
    """Root of all errors raised on purpose by vqclip.

    Messages quote names and values from unchecked files, so `printable` is applied to each message.
    """

    def __init__(self, *args: object):
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class ConfigError(VqclipError, ValueError):
    """An invalid configuration file, override or option; the message lists every problem."""


def import_extra(module: str, extra: str, key: str = "") -> Any:
    """Import a module of an extra; raise ConfigError, with the command of pip, if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}needs the package {module.partition('.')[0]}, which is not installed ({error}); pip install "
            f"'vqclip[{extra}]'"
        ) from error


class DataError(VqclipError, ValueError):
    """A shard, sample or data folder that cannot be used; the message names the file and the sample.

    Attributes:
        kind: kind of the error in one or two words; bad samples are counted by it.
    """

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(message)
        self.kind = kind


class StorageError(DataError):
    """Storage that cannot be reached, read or written, or whose content has changed.

    The samples themselves are not bad, so none of them is replaced.
    """


@contextlib.contextmanager
def name_section(key: str) -> Iterator[None]:
    """Put the key path of a section of the configuration before the errors of the block in its values or its data.

    Args:
        key: such as ``data.sources[0]``; "" leaves errors as they are.
    """
    try:
        yield
    except (ConfigError, DataError) as error:
        if key:
            of_a_key = re.match(r"[a-z_]+(\[\d+\])?: ", message := str(error))
            error.args = (f"{key}{'.' if of_a_key else ': '}{message}", *error.args[1:])
        raise


class ShapeError(VqclipError, ValueError):
    """A tensor of the wrong shape, dtype or range; the message gives what was got and what was expected."""


class CheckpointError(VqclipError, RuntimeError):
    """A checkpoint or exported folder that is missing, damaged or does not fit; the message names the file."""


class OtherRunError(CheckpointError):
    """A checkpoint of a run with another configuration or other data; the message lists the differences."""


class BackendError(VqclipError, RuntimeError):
    """A runtime such as onnxruntime that failed on valid inputs; the message is that of the runtime."""


class DistributedError(VqclipError, RuntimeError):
    """A failure of another rank or of the process group; the message says which rank and what to change."""


class NonFiniteError(VqclipError, FloatingPointError):
    """A loss, gradient or tensor to be saved that contains NaN or infinity; the message names it."""


class ReplayError(VqclipError, RuntimeError):
    """Two forwards of the same samples that differ but must be equal; the message names the module."""


class StopRequested(Exception):
    """A signal asked the run to stop; raised on every rank at a point from which the run can be resumed."""
