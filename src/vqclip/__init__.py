"""CLIP models whose images and texts are discrete tokens.

Importing this package is cheap and starts nothing: the data pipeline, the pretrained towers and the process group are
only touched by the modules that need them. What most users want is one function:

    from vqclip import load_tokenizer
    tokenizer = load_tokenizer("runs/base/tokenizer", modality="image")
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vqclip.tokenizer.loading import load_tokenizer as load_tokenizer

__version__ = "0.1.0.dev0"
"""Version of the installed package."""

__all__ = ["__version__", "load_tokenizer"]

_PARENT_PID = os.getppid()
"""Process that started this one, read before torch's slow import; see `vqclip.dist.launcher_is_gone`."""


def __getattr__(name: str) -> Any:
    if name == "load_tokenizer":
        from vqclip.tokenizer.loading import load_tokenizer

        return load_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
