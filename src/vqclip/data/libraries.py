"""Libraries that read data, imported where they are needed, and their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vqclip.data.remote import mask_credentials
from vqclip.errors import DataError, VqclipError

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
def name_errors(prefix: str, kind: str = "damaged shard") -> Iterator[None]:
    """Raise errors of the block as `DataError` with a prefix: libraries raise nearly anything for damaged data."""
    try:
        yield
    except VqclipError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise DataError(f"{prefix} ({type(error).__name__}: {mask_credentials(reason)})", kind) from None
