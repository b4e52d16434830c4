"""The error for an unknown model name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from vqclip.errors import ConfigError


def unknown_model_error(key: str, library: str, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a model that `library` does not have; `key` is the setting, `known` the valid names."""
    close = get_close_matches(name, known, n=5)
    hint = f"did you mean one of: {', '.join(close)}?" if close else f"{library}.list_models() gives the names"
    return ConfigError(f"{key}: {library} has no model {name!r}; {hint}")
