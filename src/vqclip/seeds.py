"""Seeds derived from keys: equal keys give equal random numbers on every machine."""

from __future__ import annotations

import hashlib


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed for a key such as ``(run seed, "towers", step, rank)``, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
