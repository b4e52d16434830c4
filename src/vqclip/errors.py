"""One root for every error that a user can cause or meet, so that a caller can catch them all at once."""


class VqclipError(Exception):
    """Root of all errors raised on purpose by vqclip."""


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
    """Storage that could not be reached, read or written: no sample is to blame, so none is replaced by another."""


class ShapeError(VqclipError, ValueError):
    """A tensor of the wrong shape, dtype or range; the message gives what was got and what was expected."""


class CheckpointError(VqclipError, RuntimeError):
    """A checkpoint or exported folder that is missing, damaged or does not fit; the message names the file."""


class DistributedError(VqclipError, RuntimeError):
    """Ranks that cannot work together; the message says which rank and what to change."""


class NonFiniteError(VqclipError, FloatingPointError):
    """A loss or gradient that is NaN or infinite; the message names the step and the term."""


class ReplayError(VqclipError, RuntimeError):
    """Two forwards of the same samples that differ, where they must not; the message names the module."""
