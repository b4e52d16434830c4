"""Fingerprint of a tokenizer: ids of two tokenizers mean the same only if their fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vqclip.io.tensors import add_tensors
from vqclip.tokenizer.stored import merged_state

if TYPE_CHECKING:
    from vqclip.tokenizer import Tokenizer
    from vqclip.tokenizer.decoder import TokenizerDecoder

__all__ = ["fingerprint", "pixels_fingerprint"]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer's configuration, weights and vocabulary, in hexadecimal digits.

    It is equal for a tokenizer in memory and the one loaded from its folder, on any device. ``tokenizer.double()``
    does not change it, for it changes no value of float32 weights. Neither does a pixel decoder, which changes no id.
    """
    digest = hashlib.sha256(json.dumps([tokenizer.modality, tokenizer.section()], sort_keys=True).encode())
    state = merged_state(tokenizer).items()
    add_tensors(digest, {name: _narrow(tensor) for name, tensor in state if not name.startswith("pixels.")})
    for name, content in sorted(tokenizer.files().items()):
        digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def pixels_fingerprint(tokenizer: TokenizerDecoder) -> str | None:
    """Return the SHA-256 of the configuration and weights of a tokenizer's pixel decoder; None without one."""
    if tokenizer.pixels is None:
        return None
    digest = hashlib.sha256(json.dumps(tokenizer.pixels_section(), sort_keys=True).encode())
    add_tensors(digest, {name: _narrow(tensor) for name, tensor in tokenizer.pixels.state_dict().items()})
    return digest.hexdigest()


def _narrow(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in float64 and this changes no value."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
