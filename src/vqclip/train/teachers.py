"""Frozen models that a student follows: whole ones for embeddings, single towers for features of tokens."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.config import FREE, Config, Modality
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names, module_digest, nonfinite_names
from vqclip.model import CLIP
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.towers import BPE, ImageTower, TextTower
from vqclip.towers.base import TowerConfig, frozen_features, run_in_chunks
from vqclip.towers.image import Normalize
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig, OpenCLIPTextTowerConfig, create_open_clip

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


class OpenCLIPTeacherConfig(Config):
    """An open_clip model with pretrained weights."""

    kind: Literal["open_clip"] = "open_clip"
    model: str
    """Name of the open_clip model, such as `ViT-B-16`."""
    pretrained: Annotated[str, FREE]
    """Tag of pretrained weights (`open_clip.list_pretrained()`) or the path of a local file."""

    def build(self) -> EmbeddingTeacher:
        """Load the whole model."""
        import open_clip

        clip: Any = create_open_clip(self.model, self.pretrained)
        size, settings = clip.visual.image_size, open_clip.get_model_config(self.model) or {}
        size = int(size[0] if isinstance(size, tuple) else size)
        normalize = Normalize(size, clip.visual.preprocess_cfg["mean"], clip.visual.preprocess_cfg["std"])
        vocabulary: Any = BPE(int(clip.context_length))
        if not {"hf_tokenizer_name", "hf_model_name"}.isdisjoint(settings.get("text_cfg", {})):
            try:
                vocabulary = open_clip.get_tokenizer(self.model)
            except (OSError, ImportError, ValueError) as error:
                raise ConfigError(
                    f"teacher.model: the vocabulary of {self.model!r} cannot be loaded: {error}"
                ) from error
        teacher = EmbeddingTeacher(
            clip,
            size,
            vocabulary,
            embed_images=lambda images: clip.encode_image(normalize(images), normalize=True),
            embed_texts=lambda tokens: clip.encode_text(tokens, normalize=True),
            origin={"model": self.model, "open_clip": settings},
        )
        teacher.normalize = normalize  # moves with the teacher
        return teacher

    def build_tower(self, modality: Modality, student: CLIP) -> tuple[ImageTower | TextTower, TowerConfig]:
        """Load the tower of a modality; return it with its configuration."""
        schema = OpenCLIPImageTowerConfig if modality == "image" else OpenCLIPTextTowerConfig
        # Not trained, so that batch normalisation is accepted.
        config = schema(model=self.model, pretrained=self.pretrained, train="none")
        return config.build(), config


class FolderTeacherConfig(Config):
    """Both tokenizers of a vqclip folder."""

    kind: Literal["vqclip"] = "vqclip"
    folder: Annotated[str, FREE]
    """Folder that `save_pretrained` or a run wrote, or a hub name (owner/name)."""
    quantized: bool = False
    """true: the teacher's embeddings pass through its codes; false: its quantizers are bypassed."""

    def build(self) -> EmbeddingTeacher:
        """Load both tokenizers."""
        clip = CLIP.from_pretrained(self.folder)
        files = {name: hashlib.sha256(content).hexdigest() for name, content in clip.files().items()}
        return EmbeddingTeacher(
            clip,
            clip.image.tower.image_size,
            clip.text.preprocess,
            lambda images: clip.image(images).embedding if self.quantized else clip.image.continuous(images),
            lambda tokens: clip.text(tokens).embedding if self.quantized else clip.text.continuous(tokens),
            origin={"folder": clip.section(), "files": files, "quantized": self.quantized},
        )

    def build_tower(self, modality: Modality, student: CLIP) -> tuple[ImageTower | TextTower, TowerConfig]:
        """Load the tower of a modality; return it with its configuration."""
        tokenizer = load_tokenizer(self.folder, modality)
        return tokenizer.tower, tokenizer.config.tower


class InitialTeacherConfig(Config):
    """A frozen copy of the tower with the weights that the run starts from, which must be pretrained."""

    kind: Literal["initial"] = "initial"

    def build_tower(self, modality: Modality, student: CLIP) -> tuple[ImageTower | TextTower, TowerConfig]:
        """Copy the student's tower of a modality; return it with its configuration.

        Raises:
            ConfigError: the tower has no pretrained weights.
        """
        if not getattr(student.config, modality).tower.is_pretrained:
            raise ConfigError(
                f"teacher: got kind 'initial', but model.{modality}.tower starts from random weights; expected "
                "pretrained ones, or another teacher"
            )
        tokenizer = getattr(student, modality)
        return copy.deepcopy(tokenizer.tower), tokenizer.config.tower


class EmbeddingTeacher(nn.Module):
    """A model whose embeddings of images and texts are followed, in chunks: the same bits in every batch.

    Args:
        clip: the model; ``logit_scale`` is the logarithm of its temperature.
        image_size: height and width of its images in pixels; others are resized.
        vocabulary: maps captions to its token numbers ``(B, N)``.
        embed_images: maps ``(B, 3, S, S)`` uint8 or 0..1, at its size, to ``(B, F)`` unit-norm.
        embed_texts: maps ``(B, N)`` token numbers to ``(B, F)`` unit-norm.
        origin: JSON-able settings that determine the embeddings beside the tensors of the module.
    """

    def __init__(
        self,
        clip: Any,
        image_size: int,
        vocabulary: Any,
        embed_images: Callable[[Tensor], Tensor],
        embed_texts: Callable[[Tensor], Tensor],
        origin: dict[str, Any],
    ):
        super().__init__()
        self.clip, self.image_size, self.vocabulary, self.origin = clip, image_size, vocabulary, origin
        self.embed_images, self.embed_texts = embed_images, embed_texts

    @property
    def scale(self) -> Tensor:
        """() factor of the logits."""
        return self.clip.logit_scale.exp().reshape(())

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


def freeze(teacher: _ModuleT, student: CLIP) -> tuple[_ModuleT, str]:
    """Move a teacher to the student's device and dtype, in evaluation mode and without gradients.

    Returns:
        The teacher, and the digest of the weights that were loaded.

    Raises:
        ConfigError: they contain NaN or infinity.
    """
    if bad := nonfinite_names(teacher.state_dict()):
        raise ConfigError(f"the teacher's weights contain NaN or infinity: {first_names(bad)}; expected intact weights")
    digest = module_digest(teacher.requires_grad_(False).eval())  # before the dtype changes
    return teacher.to(student.logit_scale.device, student.logit_scale.dtype), digest


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
