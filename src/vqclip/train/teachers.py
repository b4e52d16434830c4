"""Frozen models that a student follows: whole ones for embeddings, single towers for features of tokens."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.config import Config, Modality
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names, module_digest, nonfinite_names
from vqclip.model import CLIP
from vqclip.tokenizer.folder import find_folder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.towers import BPE, ImageTower, TextTower
from vqclip.towers.frozen import frozen_features, run_in_chunks
from vqclip.towers.image import Normalize
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig, OpenCLIPTextTowerConfig, create_open_clip
from vqclip.towers.training import TowerConfig

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


class OpenCLIPTeacherConfig(Config):
    """An open_clip model with pretrained weights."""

    kind: Literal["open_clip"] = "open_clip"
    model: str
    """Name of the open_clip model, such as `ViT-B-16`."""
    pretrained: str
    """Tag of pretrained weights (`open_clip.list_pretrained()`) or the path of a local file."""


class FolderTeacherConfig(Config):
    """Both tokenizers of a vqclip folder."""

    kind: Literal["vqclip"] = "vqclip"
    folder: str
    """Folder that `save_pretrained` or a run wrote, or a hub name (owner/name)."""
    quantized: bool = False
    """true: the teacher's embeddings pass through its codes; false: its quantizers are bypassed."""


class InitialTeacherConfig(Config):
    """A frozen copy of the tower with the weights that the run starts from, which must be pretrained."""

    kind: Literal["initial"] = "initial"


class EmbeddingTeacher(nn.Module, ABC):
    """A model whose embeddings of images and texts are followed, in chunks: the same bits in every batch.

    Attributes:
        image_size: height and width of its images in pixels; others are resized.
        vocabulary: maps captions to its token numbers ``(B, N)``.
        origin: JSON-able settings that determine the embeddings beside the tensors of the module.
    """

    clip: Any
    image_size: int
    vocabulary: Any
    origin: dict[str, Any]

    @property
    def scale(self) -> Tensor:
        """() factor of the logits."""
        return self.clip.logit_scale.exp().reshape(())

    @abstractmethod
    def embed_images(self, images: Tensor) -> Tensor:
        """Map ``(B, 3, S, S)`` uint8 or 0..1, at its size, to ``(B, F)`` unit-norm."""

    @abstractmethod
    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Map ``(B, N)`` numbers of its vocabulary to ``(B, F)`` unit-norm."""

    @torch.no_grad()
    def forward(self, images: Tensor, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the embeddings ``(B, F)`` of images of any size and of their captions."""
        tokens = self.vocabulary(list(captions) or [""])[: len(captions)]
        return self.of_images(images), self.of_tokens(tokens.to(self.scale.device))

    def of_images(self, images: Tensor) -> Tensor:
        """Return the embeddings ``(B, F)`` of images of any size."""
        dtype = self.scale.dtype
        return run_in_chunks(lambda rows: self.embed_images(resize(rows, self.image_size, dtype)).to(dtype), images)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``(B, F)`` of captions."""
        return run_in_chunks(lambda rows: self.embed_texts(rows).to(self.scale.dtype), tokens)

    def digest(self) -> str:
        """Return the SHA-256 of all that determines the embeddings."""
        return module_digest(self, json.dumps(self.origin, sort_keys=True))


class OpenCLIPTeacher(EmbeddingTeacher):
    """The embeddings of an open_clip model."""

    def __init__(self, config: OpenCLIPTeacherConfig):
        import open_clip

        super().__init__()
        self.clip = create_open_clip(config.model, config.pretrained)
        visual, settings = self.clip.visual, open_clip.get_model_config(config.model) or {}
        self.image_size = int(visual.image_size[0] if isinstance(visual.image_size, tuple) else visual.image_size)
        self.normalize = Normalize(self.image_size, visual.preprocess_cfg["mean"], visual.preprocess_cfg["std"])
        self.origin = {"model": config.model, "open_clip": settings}
        self.vocabulary: Any = BPE(int(self.clip.context_length))
        if not {"hf_tokenizer_name", "hf_model_name"}.isdisjoint(settings.get("text_cfg", {})):
            try:
                self.vocabulary = open_clip.get_tokenizer(config.model)
            except (OSError, ImportError, ValueError) as error:
                raise ConfigError(
                    f"teacher.model: the vocabulary of {config.model!r} cannot be loaded: {error}"
                ) from error

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
        self.image_size, self.vocabulary = self.clip.image.tower.image_size, self.clip.text.preprocess
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.clip.files().items()}
        self.origin = {"folder": self.clip.section(), "files": files, "quantized": self.quantized}

    def embed_images(self, images: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self.clip.image(images).embedding if self.quantized else self.clip.image.continuous(images)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """See `EmbeddingTeacher`."""
        return self.clip.text(tokens).embedding if self.quantized else self.clip.text.continuous(tokens)


def find_tower(
    config: OpenCLIPTeacherConfig | FolderTeacherConfig | InitialTeacherConfig, modality: Modality, student: CLIP
) -> tuple[ImageTower | TextTower, TowerConfig]:
    """Load a teacher's tower, or copy the student's; return it with its configuration.

    Raises:
        ConfigError: an initial tower without pretrained weights.
    """
    if isinstance(config, OpenCLIPTeacherConfig):
        schema = OpenCLIPImageTowerConfig if modality == "image" else OpenCLIPTextTowerConfig
        # Not trained, so that batch normalisation is accepted.
        found = schema(model=config.model, pretrained=config.pretrained, train="none")
        return found.build(), found
    if isinstance(config, FolderTeacherConfig):
        tokenizer = load_tokenizer(find_folder(config.folder), modality)
        return tokenizer.tower, tokenizer.config.tower
    if not getattr(student.config, modality).tower.is_pretrained:
        raise ConfigError(
            f"teacher: got kind 'initial', but model.{modality}.tower starts from random weights; expected pretrained "
            "ones, or another teacher"
        )
    tokenizer = getattr(student, modality)
    return copy.deepcopy(tokenizer.tower), tokenizer.config.tower


def freeze(teacher: _ModuleT) -> _ModuleT:
    """Put a teacher into evaluation mode without gradients, after checking its weights.

    Raises:
        ConfigError: they contain NaN or infinity.
    """
    if bad := nonfinite_names(teacher.state_dict()):
        raise ConfigError(f"the teacher's weights contain NaN or infinity: {first_names(bad)}; expected intact weights")
    return teacher.requires_grad_(False).eval()


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


def resize(images: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Resize ``(B, 3, H, W)`` uint8 to a teacher's size, bicubic with antialiasing; unchanged if it has that size.

    Returns:
        ``(B, 3, size, size)`` uint8, or 0..1 in ``dtype``.
    """
    if images.shape[-1] == size:
        return images
    pixels = images.to(dtype) / 255
    return F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
