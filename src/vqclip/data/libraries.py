"""Libraries that read data, imported where they are needed, and their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vqclip.data.remote import mask_credentials
from vqclip.errors import DataError, VqclipError

__all__ = ["name_errors", "require_pyarrow"]


def require_pyarrow() -> Any:
    """Return the modules ``(pyarrow, pyarrow.parquet)``.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet needs pyarrow: pip install 'vqclip[parquet]'") from None
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
