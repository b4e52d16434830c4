"""Frozen models that a student follows: whole ones for embeddings, single towers for features."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names, nonfinite_names
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.hub import find_folder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.towers import ImageTower, TextTower
from vqclip.towers.frozen import frozen_features, run_in_chunks
from vqclip.towers.image import Normalize
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig, OpenCLIPTextTowerConfig, create_open_clip
from vqclip.towers.training import TowerConfig
from vqclip.towers.vocabulary import BPE
from vqclip.train.distillation.config import (
    FolderTeacherConfig,
    InitialTeacherConfig,
    OpenCLIPTeacherConfig,
    TeacherConfig,
)


class TeacherTower(NamedTuple):
    """A tower whose features are followed."""

    tower: ImageTower | TextTower
    config: TowerConfig


def freeze(module: nn.Module) -> nn.Module:
    """Put a teacher into evaluation mode without gradients, after checking its weights.

    Raises:
        ConfigError: they contain NaN or infinity.
    """
    if bad := nonfinite_names(module.state_dict()):
        raise ConfigError(f"the teacher's weights contain NaN or infinity: {first_names(bad)}; expected intact weights")
    return module.requires_grad_(False).eval()


def resize(images: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Resize ``(B, 3, H, W)`` uint8 to a teacher's size, bicubic with antialiasing; unchanged if it has that size.

    Returns:
        ``(B, 3, size, size)`` uint8, or 0..1 in ``dtype``.
    """
    if images.shape[-1] == size:
        return images
    pixels = images.to(dtype) / 255
    return F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


class EmbeddingTeacher(nn.Module, ABC):
    """A model whose embeddings of images and texts are followed."""

    vocabulary: Any
    """Maps captions to token numbers ``(B, N)``."""
    image_size: int

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """() factor of the logits."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what determines the embeddings beside the tensors of this module."""

    @abstractmethod
    def embed_images(self, images: Tensor) -> Tensor:
        """``(B, 3, S, S)`` uint8 or 0..1, at its size → ``(B, F)`` unit-norm."""

    @abstractmethod
    def embed_texts(self, tokens: Tensor) -> Tensor:
        """``(B, N)`` numbers of its vocabulary → ``(B, F)`` unit-norm."""

    @torch.no_grad()
    def forward(self, images: Tensor, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the embeddings ``(B, F)`` of images of any size and of their captions; see `of_images`."""
        tokens = self.vocabulary(list(captions) or [""])[: len(captions)]
        return self.of_images(images), self.of_tokens(tokens.to(self.scale.device))

    def of_images(self, images: Tensor) -> Tensor:
        """Return the embeddings ``(B, F)`` of images of any size, in chunks: the same bits in every batch."""
        dtype = self.scale.dtype
        return run_in_chunks(lambda rows: self.embed_images(resize(rows, self.image_size, dtype)).to(dtype), images)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``(B, F)`` of captions, in chunks: the same bits in every batch."""
        return run_in_chunks(lambda rows: self.embed_texts(rows).to(self.scale.dtype), tokens)


class OpenCLIPTeacher(EmbeddingTeacher):
    """The embeddings of an open_clip model."""

    def __init__(self, config: OpenCLIPTeacherConfig):
        super().__init__()
        self._config = config
        self.clip = create_open_clip(config.model, config.pretrained)
        visual = self.clip.visual
        size = visual.image_size[0] if isinstance(visual.image_size, tuple) else visual.image_size
        self.image_size = int(size)
        self.normalize = Normalize(self.image_size, visual.preprocess_cfg["mean"], visual.preprocess_cfg["std"])
        self.vocabulary = _open_clip_vocabulary(config.model, int(self.clip.context_length))

    @property
    def scale(self) -> Tensor:
        """() factor of the logits."""
        scale: Tensor = self.clip.logit_scale.exp()
        return scale.reshape(())

    def describe(self) -> dict[str, Any]:
        """See `EmbeddingTeacher`."""
        import open_clip

        return {"model": self._config.model, "open_clip": open_clip.get_model_config(self._config.model)}

    def embed_images(self, images: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self.clip.encode_image(self.normalize(images), normalize=True)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self.clip.encode_text(tokens, normalize=True)


class FolderTeacher(EmbeddingTeacher):
    """The embeddings of a vqclip folder, with or without its codes."""

    def __init__(self, config: FolderTeacherConfig):
        super().__init__()
        self.clip = CLIP.from_pretrained(find_folder(config.folder))
        self.quantized = config.quantized
        self.image_size = self.clip.image.tower.image_size
        self.vocabulary = self.clip.text.preprocess

    @property
    def scale(self) -> Tensor:
        """() factor of the logits."""
        return self.clip.logit_scale.exp()

    def describe(self) -> dict[str, Any]:
        """See `EmbeddingTeacher`."""
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.clip.files().items()}
        return {"folder": self.clip.section(), "files": files, "quantized": self.quantized}

    def embed_images(self, images: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self._embed(self.clip.image, images)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self._embed(self.clip.text, tokens)

    def _embed(self, tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor) -> Tensor:
        return tokenizer(inputs).embedding if self.quantized else tokenizer.continuous(inputs)


def build_embedding_teacher(config: OpenCLIPTeacherConfig | FolderTeacherConfig) -> EmbeddingTeacher:
    """Load a teacher of embeddings; `freeze` it afterwards."""
    return OpenCLIPTeacher(config) if isinstance(config, OpenCLIPTeacherConfig) else FolderTeacher(config)


def tower_features(tower: ImageTower | TextTower, inputs: Tensor) -> Tensor:
    """Return the features of a teacher's tower, in chunks: the same bits in every batch.

    Args:
        tower: frozen.
        inputs: images ``(B, 3, S, S)`` of any size, or token numbers ``(B, N)``.

    Returns:
        ``(B, N, D)``.
    """
    if isinstance(tower, TextTower):
        return frozen_features(tower, inputs)
    dtype = tower.normalize.mean.dtype
    return run_in_chunks(lambda rows: tower(resize(rows, tower.image_size, dtype)).to(dtype), inputs)


def build_tower(config: TeacherConfig, modality: Modality, student: CLIP) -> TeacherTower:
    """Load a teacher's tower, or copy the student's; `freeze` it afterwards.

    Raises:
        ConfigError: an initial tower without pretrained weights.
    """
    if isinstance(config, InitialTeacherConfig):
        return _copy_initial(modality, student)
    if isinstance(config, FolderTeacherConfig):
        tokenizer = load_tokenizer(find_folder(config.folder), modality)
        return TeacherTower(tokenizer.tower, tokenizer.config.tower)
    schema = OpenCLIPImageTowerConfig if modality == "image" else OpenCLIPTextTowerConfig
    # Not trained, so that batch normalisation is accepted.
    found = schema(model=config.model, pretrained=config.pretrained, train="none")
    return TeacherTower(found.build(), found)


def _copy_initial(modality: Modality, student: CLIP) -> TeacherTower:
    tokenizer = getattr(student, modality)
    if not getattr(student.config, modality).tower.is_pretrained:
        raise ConfigError(
            f"teacher: got kind 'initial', but model.{modality}.tower starts from random weights; expected pretrained "
            "ones, or another teacher"
        )
    return TeacherTower(copy.deepcopy(tokenizer.tower), tokenizer.config.tower)


def _open_clip_vocabulary(model: str, context_length: int) -> Any:
    import open_clip

    text = (open_clip.get_model_config(model) or {}).get("text_cfg", {})
    if "hf_tokenizer_name" not in text and "hf_model_name" not in text:
        return BPE(context_length)
    try:
        return open_clip.get_tokenizer(model)
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"teacher.model: the vocabulary of {model!r} cannot be loaded: {error}") from error
