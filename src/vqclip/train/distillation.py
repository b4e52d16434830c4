"""Distillation: terms of the training loss that make the model follow frozen teachers.

    Distillation.build(config.distillation, model, seed)   teachers are loaded, each for its term
    sums  = distillation.compare(out, samples, step)        towers' features beside the teachers'; sums over tokens
    terms, weights = distillation.losses(...)               over the global batch

Embeddings are compared by `vqclip.losses.DistillationLoss`. Features of tokens are compared after the forward of a
microbatch; their sums are reduced over ranks in the step's one exchange. Teachers are no part of the model: they have
no gradient, no optimizer state, and are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config, Modality
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.tensors import module_digest
from vqclip.losses import DistillationLoss
from vqclip.losses.features import Implementation
from vqclip.model import CLIP, CLIPOutput
from vqclip.nn.precision import full_precision
from vqclip.quantizers import Stats
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers import ImageTower, TextTower
from vqclip.train.feature_jobs import FeatureMaker, tower_origin, vocabulary_origin
from vqclip.train.tasks.base import RankBatch
from vqclip.train.teachers import (
    EmbeddingTeacher,
    FolderTeacher,
    FolderTeacherConfig,
    InitialTeacherConfig,
    OpenCLIPTeacher,
    OpenCLIPTeacherConfig,
    find_tower,
    freeze,
    tower_features,
)


class DistillationTerm(Config):
    """Common keys of all terms."""

    if TYPE_CHECKING:
        kind: Any
        teacher: Any
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    until_step: int | None = Field(None, ge=1)
    """First step without the term, whose teacher is then not run; null: the term stays to the end."""


class EmbeddingDistillationConfig(DistillationTerm):
    """Similarities of images and texts: the student's softmax follows the teacher's, over rows and columns.

    CLIP-KD (Yang et al. 2024, https://arxiv.org/abs/2307.12732); see `vqclip.losses.DistillationLoss`.
    """

    kind: Literal["embeddings"] = "embeddings"
    teacher: Annotated[OpenCLIPTeacherConfig | FolderTeacherConfig, Field(discriminator="kind")]
    """Model whose embeddings are followed."""
    impl: Implementation = "tiled"
    """Implementation; see the contrastive loss."""


class FeatureDistillationConfig(DistillationTerm):
    """Features of a tower: 1 - cosine to the teacher's, of each patch or token.

    `image_features` needs as many patches, `text_features` the same vocabulary.
    """

    kind: Literal["image_features", "text_features"]
    teacher: Annotated[OpenCLIPTeacherConfig | FolderTeacherConfig | InitialTeacherConfig, Field(discriminator="kind")]
    """Model whose tower is followed."""


DistillationConfig = Annotated[EmbeddingDistillationConfig | FeatureDistillationConfig, Field(discriminator="kind")]
"""A term of distillation, chosen by ``kind``."""


class EmbeddingTerm:
    """A term that follows the embeddings of a whole model.

    Attributes:
        digest: of the teacher's weights, for the identity of the run.
        teacher: None once its outputs are stored.
    """

    teacher: EmbeddingTeacher | None

    def __init__(self, config: EmbeddingDistillationConfig, name: str, student: CLIP):
        self.config, self.name, self.student, self.loss = config, name, student, DistillationLoss(config.impl)
        teacher = (
            OpenCLIPTeacher(config.teacher)
            if isinstance(config.teacher, OpenCLIPTeacherConfig)
            else FolderTeacher(config.teacher)
        )
        self.digest = module_digest(freeze(teacher))  # before its dtype changes
        self.teacher = teacher.to(student.logit_scale.device, student.logit_scale.dtype)
        self.scale = teacher.scale.detach().clone()

    def embed(self, parts: Sequence[RankBatch]) -> tuple[Tensor, Tensor]:
        """Return the teacher's embeddings ``(B, F)`` of images and captions, stored or computed."""
        pairs = []
        for part in parts:
            if f"{self.name}/image" in part.features:
                pairs.append((part.features[f"{self.name}/image"][:, 0], part.features[f"{self.name}/text"][:, 0]))
            else:
                assert self.teacher is not None
                pairs.append(self.teacher(part.images, part.captions))
        images, texts = zip(*pairs, strict=True)
        return torch.cat(images), torch.cat(texts)

    def makers(self) -> dict[str, FeatureMaker]:
        """Return the makers of the teacher's embeddings, one token a sample."""
        teacher, size = self.teacher, self.student.image.tower.image_size
        assert teacher is not None
        with torch.no_grad():
            width = teacher.of_images(torch.zeros(1, 3, size, size, device=self.scale.device)).shape[-1]
        origin = {"teacher": teacher.digest()}

        def maker(modality: Modality, embed: Callable[[Tensor], Tensor], **others: Any) -> FeatureMaker:
            what = f"teacher of {self.name} ({modality}s)"
            return FeatureMaker(
                modality, what, lambda rows: embed(rows)[:, None], 1, width, self.scale.device, **others
            )

        return {
            f"{self.name}/image": maker("image", teacher.of_images, origin=origin | {"image_size": size}),
            f"{self.name}/text": maker("text", teacher.of_tokens, origin=origin, tokenize=teacher.vocabulary),
        }


class FeatureTerm:
    """A term that follows the features of a tower; see `EmbeddingTerm`."""

    teacher: ImageTower | TextTower | None

    def __init__(self, config: FeatureDistillationConfig, name: str, student: CLIP, seed: int):
        self.config, self.name = config, name
        self.modality: Modality = "image" if config.kind == "image_features" else "text"
        self.tokenizer: Tokenizer = getattr(student, self.modality)
        tower = self.tokenizer.tower
        if tower.is_frozen and not tower.first_step:
            raise ConfigError(
                f"got {config.kind} for a frozen tower (model.{self.modality}.tower.train: none), which cannot follow "
                "a teacher; expected a tower that trains, or no such term"
            )
        teacher, self._teacher_config = find_tower(config.teacher, self.modality, student)
        _require_same_tokens(teacher, tower)
        self.comparison = FeatureComparison(tower.width, teacher.width, seed).to(student.logit_scale.device)
        self.digest = module_digest(freeze(teacher))  # before its dtype changes
        self.teacher = teacher.to(student.logit_scale.device, student.logit_scale.dtype)

    def follow(self, samples: RankBatch) -> Tensor:
        """Return the teacher's features ``(B, N, D)``, stored or computed."""
        inputs = samples.images if self.modality == "image" else samples.tokens
        if self.name in samples.features:
            found = samples.features[self.name]
            return found if self.modality == "image" else found[:, : inputs.shape[1]]
        assert self.teacher is not None
        with torch.no_grad():
            return tower_features(self.teacher, inputs)

    def compare(self, out: CLIPOutput, samples: RankBatch) -> Stats:
        """Return the sum over this rank's tokens, and their count; see `FeatureComparison`."""
        features = out.image_features if self.modality == "image" else out.text_features
        assert features is not None
        mask = self.tokenizer.mask(samples.tokens) if self.modality == "text" else None
        return self.comparison(features, self.follow(samples), mask)

    def makers(self) -> dict[str, FeatureMaker]:
        """Return the maker of the teacher's features; a frozen tower of a run with this tower has the same ones."""
        theirs, tower = self.teacher, self.tokenizer.tower
        assert theirs is not None
        origin = tower_origin(theirs, self._teacher_config) | vocabulary_origin(self.tokenizer)
        if isinstance(tower, ImageTower) and isinstance(theirs, ImageTower) and tower.image_size != theirs.image_size:
            origin["image_size"] = tower.image_size  # of the pixels that are resized for the teacher
        return {
            self.name: FeatureMaker(
                modality=self.modality,
                network=f"teacher of {self.name}",
                compute=partial(tower_features, theirs),
                tokens=tower.num_tokens,
                width=theirs.width,
                device=self.tokenizer.device,
                origin=origin,
                tokenize=self.tokenizer.preprocess if isinstance(self.tokenizer, TextTokenizer) else None,
            )
        }


class FeatureComparison(nn.Module):
    """Sum over tokens of 1 - cosine between two features.

    The cosine ignores the length of a feature, as the LayerNorm after a tower does. If the widths differ, the wider
    feature is first mapped to the narrower width by a fixed matrix with orthonormal rows. It is drawn by key and never
    trained: a run needs neither to save it nor to average its gradient.

    Args:
        student: width of the student's features.
        teacher: width of the teacher's.
        seed: key of the matrix.
    """

    map: Tensor | None

    def __init__(self, student: int, teacher: int, seed: int):
        super().__init__()
        rows, columns = sorted((student, teacher))
        matrix = None
        if rows != columns:
            matrix = torch.empty(rows, columns, dtype=torch.float64)
            nn.init.orthogonal_(matrix, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("map", matrix, persistent=False)

    def forward(self, features: Tensor, target: Tensor, mask: Tensor | None) -> Stats:
        """Compare ``(B, N, D)`` with the teacher's ``(B, N, D')``, where ``mask`` ``(B, N)`` is True if given.

        Returns:
            This rank's ``sum``, differentiable, and ``count`` of tokens.
        """
        with full_precision(features.device):
            dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
            mine, theirs = features.to(dtype), target.detach().to(dtype)
            if self.map is not None:
                matrix = self.map.to(dtype)
                mine, theirs = (x @ matrix.T if x.shape[-1] > len(matrix) else x for x in (mine, theirs))
            apart = 1 - F.cosine_similarity(mine, theirs, dim=-1)
            if mask is not None:
                apart = apart.where(mask, 0)
            count = torch.full((), apart.numel(), device=apart.device) if mask is None else mask.sum()
            return Stats({"sum": apart.sum(), "count": count})


class Distillation:
    """Terms of the loss that follow teachers.

    Args:
        terms: by name.
    """

    def __init__(self, terms: dict[str, EmbeddingTerm | FeatureTerm]):
        self.terms = terms
        self.identity = [_identity(term.config, term.digest) for term in terms.values()]
        """Settings and teachers that define the trajectory."""
        self.ends = {term.config.until_step for term in terms.values()}
        """First steps without a term; None for one that stays."""

    @staticmethod
    def build(configs: Sequence[DistillationConfig], model: CLIP, seed: int) -> Distillation | None:
        """Load the teachers to the model's device and dtype; None without terms. A collective.

        Args:
            configs: the terms.
            model: the student, with its initial weights.
            seed: run seed.

        Raises:
            ConfigError: on every rank, for a teacher that cannot be loaded or does not fit the student; names the key.
        """
        if not configs:
            return None
        terms: dict[str, EmbeddingTerm | FeatureTerm] = {}
        kinds = [config.kind for config in configs]
        with dist.raise_on_all_ranks():
            for number, config in enumerate(configs):
                turn = kinds[: number + 1].count(config.kind)
                name = config.kind if turn == 1 else f"{config.kind}_{turn}"
                with _name_errors(f"distillation[{number}]"):
                    if isinstance(config, EmbeddingDistillationConfig):
                        terms[name] = EmbeddingTerm(config, name, model)
                    else:
                        terms[name] = FeatureTerm(config, name, model, derive_seed(seed, "distillation", name))
        if others := dist.differing_ranks([term.digest for term in terms.values()]):
            raise ConfigError(
                f"distillation: rank {', '.join(others)} loaded other teachers than rank 0; expected the same files on "
                "every machine"
            )
        return Distillation(terms)

    def makers(self, stores: Callable[[DistillationTerm], bool]) -> dict[str, FeatureMaker]:
        """Return the makers of what the teachers compute for the terms that ``stores`` chooses, by name."""
        chosen = [term for term in self.terms.values() if stores(term.config)]
        return {key: maker for term in chosen for key, maker in term.makers().items()}

    def release_teachers(self, stores: Callable[[DistillationTerm], bool]) -> None:
        """Forget the teachers of the terms that ``stores`` chooses: batches contain what they would compute."""
        for term in self.terms.values():
            if stores(term.config):
                term.teacher = None

    def compares_features(self, step: int) -> bool:
        """Return whether `compare` needs the towers' features in step number ``step``."""
        return any(isinstance(term, FeatureTerm) for term in self._terms_at(step))

    def compare(self, out: CLIPOutput, samples: RankBatch, step: int) -> Stats:
        """Compare features of tokens; return the sums and counts of this rank by term.

        Args:
            out: of the model, with the towers' features.
            samples: in a microbatch of this rank.
            step: number of the step.
        """
        found = {}
        for term in self._terms_at(step):
            if isinstance(term, FeatureTerm):
                found[term.name] = term.compare(out, samples)
        return Stats.nest(found)

    def losses(
        self, image: Tensor, text: Tensor, scale: Tensor, sums: Stats | None, parts: Sequence[RankBatch], step: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the unweighted terms of this step over the global batch, and their weights. A collective.

        Args:
            image: ``(B, E)`` embeddings of all samples of this rank.
            text: ``(B, E)`` of their captions.
            scale: () of the logits.
            sums: of `compare`, of all ranks; None if no features were compared.
            parts: the samples in the parts in which the teachers run.
            step: number of the step.
        """
        terms, weights = {}, {}
        for term in self._terms_at(step):
            key = f"distillation/{term.name}"
            weights[key] = term.config.weight
            if isinstance(term, EmbeddingTerm):
                terms[key] = term.loss(image, text, scale, *term.embed(parts), term.scale, parts[0].sizes)
            else:
                assert sums is not None
                found = sums.under(term.name)
                terms[key] = found["sum"] / found["count"]
        return terms, weights

    def _terms_at(self, step: int) -> list[EmbeddingTerm | FeatureTerm]:
        ends = ((term, term.config.until_step) for term in self.terms.values())
        return [term for term, end in ends if end is None or step < end]


def _identity(config: DistillationTerm, digest: str) -> dict[str, Any]:
    """Return what defines the trajectory: the digest of the teacher's weights in place of their path."""
    settings = config.model_dump(mode="json")
    teacher = {name: value for name, value in settings["teacher"].items() if name not in ("folder", "pretrained")}
    return settings | {"teacher": teacher | {"digest": digest}}


def _require_same_tokens(teacher: ImageTower | TextTower, student: ImageTower | TextTower) -> None:
    """Check that a teacher has a feature for every token of the student, and can read its token numbers."""
    if not isinstance(teacher, TextTower) or not isinstance(student, TextTower):
        if teacher.num_tokens != student.num_tokens:
            raise ConfigError(
                f"teacher: got {teacher.num_tokens} patches an image; the student has {student.num_tokens}; expected "
                "as many: another image_size or patch size of model.image.tower, or kind: embeddings"
            )
        return
    theirs, mine = teacher.vocabulary, student.vocabulary
    if type(theirs) is not type(mine) or theirs.files() != mine.files() or theirs.describe() != mine.describe():
        raise ConfigError(
            f"teacher: got the vocabulary {theirs.describe()!r}; the student has {mine.describe()!r}; expected the "
            "same, or kind: embeddings"
        )
    longest, needed = teacher.context_length, student.context_length
    if longest < needed or (teacher.sees_padding and (longest != needed or not student.sees_padding)):
        exactly = "exactly" if teacher.sees_padding else "at least"
        raise ConfigError(
            f"teacher: got a context of {longest} tokens; the student has {needed}; expected {exactly} as many"
            + (", and a student that sees the padding too" if teacher.sees_padding else "")
        )


@contextmanager
def _name_errors(key: str) -> Iterator[None]:
    """Raise errors of a teacher as ConfigError with the key path of its term."""
    try:
        yield
    except VqclipError as error:
        text = str(error)
        if text.startswith(("tower", "teacher")):
            raise ConfigError(f"{key}.teacher{text.removeprefix('tower').removeprefix('teacher')}") from error
        raise ConfigError(f"{key}: {text}") from error
