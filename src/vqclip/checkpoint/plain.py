"""Check of values that JSON stores exactly."""

from __future__ import annotations

import math
from typing import Any

from vqclip.errors import CheckpointError


def check_plain(value: Any, where: str) -> None:
    """Refuse values that JSON would change or lose; tuples are allowed and become lists.

    Raises:
        CheckpointError: a key that is not a string, NaN, infinity, or any other type; the message has ``where``.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: key {key!r} is {type(key).__name__}; JSON keys are strings")
            check_plain(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_plain(item, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where}: {value} cannot be stored; JSON has finite numbers only")
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        raise CheckpointError(f"{where}: {type(value).__name__} cannot be stored; expected a JSON value")
