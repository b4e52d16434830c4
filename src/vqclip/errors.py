"""One root for every error that a user can cause or meet, so that a caller can catch them all at once."""

from __future__ import annotations


def printable(text: str, *, one_line: bool = False) -> str:
    """Text of unknown origin, as it may go to a terminal or a log.

    Control characters, marks that turn the direction of writing, lone surrogates and the like are spelt out as
    escapes of Python.

    Args:
        text: what somebody else wrote.
        one_line: spell out line breaks too; for names, which could otherwise pass for lines of their own.
    """
    if text.isprintable():
        return text
    kept = "" if one_line else "\n"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


class VqclipError(Exception):
    """Root of all errors raised on purpose by vqclip.

    Messages quote names and values from files that nobody checked: each is made `printable`.
    """

    def __init__(self, *args: object):
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class ConfigError(VqclipError, ValueError):
    """A configuration file or override that cannot be used; the message lists every problem found."""


class DataError(VqclipError, ValueError):
    """A shard, sample or data folder that cannot be used; the message names the file and the sample.

    Attributes:
        kind: what is wrong, in a word or two; bad samples are counted by it.
    """

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(message)
        self.kind = kind


class StorageError(DataError):
    """Storage that could not be reached, read or written, or holds another thing than it did.

    No sample is to blame, so none is replaced by another.
    """


class ShapeError(VqclipError, ValueError):
    """A tensor of the wrong shape, dtype or range; the message gives what was got and what was expected."""


class CheckpointError(VqclipError, RuntimeError):
    """A checkpoint or exported folder that is missing, damaged or does not fit; the message names the file."""


class OtherRunError(CheckpointError):
    """A checkpoint of a run with another configuration or other data; the message lists the differences."""


class BackendError(VqclipError, RuntimeError):
    """A runtime of others, such as onnxruntime, that failed at inputs which fit; the message is its own."""


class DistributedError(VqclipError, RuntimeError):
    """Ranks that cannot work together; the message says which rank and what to change."""


class NonFiniteError(VqclipError, FloatingPointError):
    """A loss, gradient or tensor to be saved that contains NaN or infinity; the message names it."""


class ReplayError(VqclipError, RuntimeError):
    """Two forwards of the same samples that differ, where they must not; the message names the module."""


class StopRequested(Exception):
    """A signal has asked the run to stop, and it is left where it can go on later; on every rank alike."""
