"""CLIP models whose images and texts are discrete tokens.

Importing this package is cheap and starts nothing: every name below is imported on first use. Most programs need one
function:

    from vqclip import load_tokenizer
    tokenizer = load_tokenizer("runs/base/tokenizer", modality="image")
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vqclip.evaluation import evaluate as evaluate
    from vqclip.model import CLIP as CLIP
    from vqclip.tokenizer import ImageTokenizer as ImageTokenizer
    from vqclip.tokenizer import TextTokenizer as TextTokenizer
    from vqclip.tokenizer.loading import load_tokenizer as load_tokenizer

__version__ = "0.1.0"
"""Version of the installed package."""

_MODULES = {
    "CLIP": "vqclip.model",
    "ImageTokenizer": "vqclip.tokenizer",
    "TextTokenizer": "vqclip.tokenizer",
    "evaluate": "vqclip.evaluation",
    "load_tokenizer": "vqclip.tokenizer.loading",
}
"""Public names → the modules that define them, each imported on first use."""

__all__ = ["CLIP", "ImageTokenizer", "TextTokenizer", "__version__", "evaluate", "load_tokenizer"]

_PARENT_PID = os.getppid()
"""Process that started this one, read before torch's slow import; see `vqclip.dist.launcher_has_died`."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__


def lazy_getattr(package: str, module: str = "_public") -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports the module of its public names on first use."""

    def get(name: str) -> Any:
        if not name.startswith("_"):
            public = vars(import_module(f"{package}.{module}"))
            if name in public:
                return public[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
