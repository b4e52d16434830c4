"""The cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where indexes and drawn data lie: environment variable VQCLIP_CACHE, else ~/.cache/vqclip."""
    return Path(os.environ.get("VQCLIP_CACHE") or Path.home() / ".cache" / "vqclip")
