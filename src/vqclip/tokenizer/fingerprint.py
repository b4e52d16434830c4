"""What a tokenizer is, as one hash: ids mean the same only for one tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vqclip.tokenizer import Tokenizer

__all__ = ["fingerprint"]


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of a tokenizer's configuration and of every weight, in hexadecimal digits.

    The same for a tokenizer in memory and for the one loaded from its folder, on any device. ``tokenizer.double()``
    leaves the fingerprint of float32 weights as it is, since it changes no value.
    """
    digest = hashlib.sha256(json.dumps([tokenizer.modality, tokenizer.section()], sort_keys=True).encode())
    for name, tensor in sorted(tokenizer.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        if plain.dtype == torch.float64 and torch.equal(plain.float().double(), plain):
            plain = plain.float()
        digest.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
