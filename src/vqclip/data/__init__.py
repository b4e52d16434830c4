"""Data: shards, their index, the order of samples, decoding, transforms, batches.

The public names are imported when the first of them is asked for: a tokenizer needs `decode` and `transforms` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vqclip.data._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        public = import_module("vqclip.data._public")
        if name in public.__all__:
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
