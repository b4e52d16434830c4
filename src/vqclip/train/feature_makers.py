"""Networks whose features are stored, and fingerprints of them and of their input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.io.tensors import module_digest
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers.training import TowerConfig


@dataclass(frozen=True)
class FeatureMaker:
    """A frozen network whose features are stored."""

    modality: Modality
    network: str
    """Name of the network, for messages, such as "image tower"."""
    compute: Callable[[Tensor], Tensor]
    """Images ``(R, 3, S, S)`` or token numbers ``(R, T)`` → features ``(R, N, D)``, the same bits in every batch."""
    tokens: int
    """N, tokens of a sample."""
    width: int
    """D, features of a token."""
    device: torch.device
    origin: dict[str, Any]
    """Everything about the network and its input that determines the features."""
    tokenize: Callable[[list[str]], Tensor] | None = None
    """Captions → token numbers; None for images."""


def tower_maker(tokenizer: Tokenizer) -> FeatureMaker:
    """Return the maker of a frozen tower's features, reduced if `Tokenizer.reduces_early`."""
    tower, reduction = tokenizer.tower, tokenizer.reduce if tokenizer.reduces_early else None
    reduced = {} if reduction is None else {"reduce": tokenizer.config.reduce.model_dump(mode="json")}
    return FeatureMaker(
        modality="image" if tokenizer.modality == "image" else "text",
        network=f"{tokenizer.modality} tower",
        compute=tokenizer.tower_features,
        tokens=tower.num_tokens if reduction is None else reduction.num_tokens,
        width=tower.width,
        device=tokenizer.device,
        origin=tower_origin(tower, tokenizer.config.tower) | reduced | vocabulary_origin(tokenizer),
        tokenize=tokenizer.preprocess if isinstance(tokenizer, TextTokenizer) else None,
    )


def tower_origin(tower: nn.Module, config: TowerConfig) -> dict[str, Any]:
    """Return the SHA-256 of the configuration of a tower, but for what trains, and of all its tensors."""
    return {"tower": module_digest(tower, f"{type(tower).__name__} {config.model_dump_json(exclude={'train'})}")}


def vocabulary_origin(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what determines the token numbers of a caption; nothing for images."""
    if not isinstance(tokenizer, TextTokenizer):
        return {}
    vocabulary = tokenizer.preprocess
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(vocabulary.files().items())}
    return {
        "vocabulary": vocabulary.describe(),
        "vocabulary_files": files,
        "context_length": vocabulary.context_length,
    }
