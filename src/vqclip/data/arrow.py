"""pyarrow, imported where it is needed, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vqclip.errors import DataError

__all__ = ["name_errors", "require_pyarrow"]


def require_pyarrow(otherwise: str = "") -> Any:
    """Return the modules ``(pyarrow, pyarrow.parquet)``.

    Args:
        otherwise: added to the message: how to do without.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"Parquet needs pyarrow: pip install 'vqclip[parquet]'{otherwise}") from None
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def name_errors(prefix: str) -> Iterator[None]:
    """Raise errors of the block as `DataError` with a prefix: pyarrow raises nearly anything for damaged files."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = str(error).splitlines() or [""]
        raise DataError(f"{prefix} ({type(error).__name__}: {reason[0]})", "damaged shard") from None
