"""The `distillation` section of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.losses.features import Implementation


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


class DistillationTerm(Config):
    """Common keys of all terms."""

    if TYPE_CHECKING:
        kind: Any
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    until_step: int | None = Field(None, ge=1)
    """First step without the term, whose teacher is then not run; null: the term stays to the end."""

    def weight_at(self, step: int) -> float:
        """Return the factor in step number ``step``, from 0; 0 if the term is over."""
        return self.weight if self.until_step is None or step < self.until_step else 0.0

    def identity(self, digest: str) -> dict[str, Any]:
        """Return what defines the trajectory: the digest of the teacher's weights in place of their path."""
        settings = self.model_dump(mode="json")
        teacher = {name: value for name, value in settings["teacher"].items() if name not in ("folder", "pretrained")}
        return settings | {"teacher": teacher | {"digest": digest}}


class EmbeddingDistillationConfig(DistillationTerm):
    """Similarities of images and texts: the student's softmax follows the teacher's, over rows and columns.

    CLIP-KD (Yang et al. 2024, https://arxiv.org/abs/2307.12732); see `vqclip.losses.DistillationLoss`.
    """

    kind: Literal["embeddings"] = "embeddings"
    teacher: Annotated[OpenCLIPTeacherConfig | FolderTeacherConfig, Field(discriminator="kind")]
    """Model whose embeddings are followed."""
    impl: Implementation = "tiled"
    """Implementation; see the contrastive loss."""


class FeatureTerm(DistillationTerm):
    """Common keys of the terms on token features."""

    teacher: Annotated[OpenCLIPTeacherConfig | FolderTeacherConfig | InitialTeacherConfig, Field(discriminator="kind")]
    """Model whose tower is followed."""


class ImageFeatureDistillationConfig(FeatureTerm):
    """Features of the image tower: 1 - cosine to the teacher's, of each patch; as many patches are needed."""

    kind: Literal["image_features"] = "image_features"


class TextFeatureDistillationConfig(FeatureTerm):
    """Features of the text tower: 1 - cosine to the teacher's, of each token; the same vocabulary is needed."""

    kind: Literal["text_features"] = "text_features"


DistillationConfig = Annotated[
    EmbeddingDistillationConfig | ImageFeatureDistillationConfig | TextFeatureDistillationConfig,
    Field(discriminator="kind"),
]
"""A term of distillation, chosen by ``kind``."""
TeacherConfig = OpenCLIPTeacherConfig | FolderTeacherConfig | InitialTeacherConfig
"""Any teacher."""
FeatureDistillationConfig = ImageFeatureDistillationConfig | TextFeatureDistillationConfig
"""A term on token features."""
