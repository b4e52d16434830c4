"""Seeds from names: every random draw states what it is keyed by, and equal keys draw equal numbers anywhere."""

from __future__ import annotations

import hashlib


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as ``(run seed, "towers", step, rank)``; the same on every machine and version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
