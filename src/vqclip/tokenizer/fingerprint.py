"""Fingerprint of a tokenizer: ids of two tokenizers mean the same only if their fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from vqclip.tokenizer.stored import merged_state

if TYPE_CHECKING:
    from vqclip.tokenizer import Tokenizer

__all__ = ["fingerprint"]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer's configuration, weights and vocabulary, in hexadecimal digits.

    It is equal for a tokenizer in memory and the one loaded from its folder, on any device. ``tokenizer.double()``
    does not change it, for it changes no value of float32 weights.
    """
    digest = hashlib.sha256(json.dumps([tokenizer.modality, tokenizer.section()], sort_keys=True).encode())
    for name, tensor in sorted(merged_state(tokenizer).items()):
        plain = tensor.detach().cpu().contiguous()
        if plain.dtype == torch.float64 and torch.equal(plain.float().double(), plain):
            plain = plain.float()
        digest.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    for name, content in sorted(tokenizer.files().items()):
        digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()
