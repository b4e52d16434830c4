"""Captions of images that have a class and no caption of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from vqclip.errors import DataError

__all__ = ["DEFAULT_TEMPLATE", "Prompts", "Templates"]

DEFAULT_TEMPLATE = "a photo of a {c}"
"""Prompt of data with classes and without prompts."""


def _have_places(templates: tuple[str, ...]) -> tuple[str, ...]:
    if not templates or not all("{c}" in each for each in templates):
        raise ValueError(f"got {list(templates)}; expected prompts with {{c}} for the class name")
    return templates


Templates = Annotated[tuple[str, ...], AfterValidator(_have_places)]
"""At least one prompt, each with ``{c}`` for the class name."""


class Prompts:
    """Every template with the name of a class.

    Args:
        templates: prompts with ``{c}``.
        classnames: names of the classes.
    """

    def __init__(self, templates: Sequence[str], classnames: Sequence[str]):
        self._of = [tuple(each.replace("{c}", name) for each in templates) for name in classnames]

    def of(self, label: int, where: str) -> tuple[str, ...]:
        """Return the prompts of a class; raise DataError, which begins with ``where``, for a number of no class."""
        if not 0 <= label < len(self._of):
            raise DataError(f"{where}; expected a class number, 0 to {len(self._of) - 1}", "class number")
        return self._of[label]

    @property
    def sha256(self) -> str:
        """SHA-256 of all prompts."""
        return hashlib.sha256("\n".join(prompt for each in self._of for prompt in each).encode()).hexdigest()
