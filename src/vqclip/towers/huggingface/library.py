"""Lazy import of the extra ``transformers``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from vqclip.errors import ConfigError

__all__ = ["quiet", "require"]


def require(package: str = "transformers") -> Any:
    """Import a package of the extra ``transformers``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"tower.kind: transformers needs the package {package}, which is not installed ({error}); "
            "pip install 'vqclip[transformers]'"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turn off the messages and progress bars of transformers; errors are raised anyway."""
    logging = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
