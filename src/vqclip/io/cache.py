"""The cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of indexes and drawn data: environment variable VQCLIP_CACHE, else ~/.cache/vqclip."""
    return Path(os.environ.get("VQCLIP_CACHE") or Path.home() / ".cache" / "vqclip")
