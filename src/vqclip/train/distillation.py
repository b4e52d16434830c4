"""Distillation: terms of the training loss that make the model follow frozen teachers.

    distillation = Distillation(configs, model, seed)      teachers are loaded, each for its term
    sums  = distillation.compare(out, samples, step)       towers' features beside the teachers'; sums over tokens
    terms, weights = distillation.losses(...)              over the global batch

Embeddings are compared by `vqclip.losses.DistillationLoss`. Features of tokens are compared after the forward of a
microbatch; their sums are reduced over ranks in the step's one exchange. Teachers are no part of the model: they have
no gradient, no optimizer state, and are not saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import FREE, Config, Modality
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.tensors import module_digest
from vqclip.losses import DistillationLoss, Implementation
from vqclip.model import CLIP, CLIPOutput
from vqclip.nn.precision import full_precision
from vqclip.quantizers import Stats
from vqclip.seeds import derive_seed
from vqclip.tokenizer import Tokenizer
from vqclip.towers import ImageTower, TextTower
from vqclip.train.feature_cache import FeatureMaker, maker_for
from vqclip.train.tasks.base import RankBatch
from vqclip.train.teachers import (
    EmbeddingTeacher,
    FolderTeacherConfig,
    InitialTeacherConfig,
    OpenCLIPTeacherConfig,
    freeze,
    tower_features,
)


class DistillationConfig(Config):
    """A term of the loss that follows a teacher.

    Embeddings: the student's softmax over similarities of images and texts follows the teacher's, over rows and columns
    (CLIP-KD, Yang et al. 2024, https://arxiv.org/abs/2307.12732; see `vqclip.losses.DistillationLoss`). Features of a
    tower: 1 - cosine to the teacher's, of each patch or token.
    """

    kind: Literal["embeddings", "image_features", "text_features"]
    """embeddings, or features of a tower: those of images need as many patches, those of texts the same vocabulary."""
    teacher: Annotated[OpenCLIPTeacherConfig | FolderTeacherConfig | InitialTeacherConfig, Field(discriminator="kind")]
    """Model whose embeddings, or whose tower's features, are followed; initial for features alone."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    until_step: int | None = Field(None, ge=1)
    """First step without the term, whose teacher is then not run; null: the term stays to the end."""
    impl: Annotated[Implementation, FREE] = "tiled"
    """Implementation of the loss on embeddings; see the contrastive loss."""

    @model_validator(mode="after")
    def _settings_belong_to_the_kind(self) -> DistillationConfig:
        if self.kind == "embeddings" and isinstance(self.teacher, InitialTeacherConfig):
            raise ValueError("got teacher kind initial with kind embeddings; expected open_clip or vqclip")
        if self.kind != "embeddings" and self.impl != "tiled":
            raise ValueError(f"got impl {self.impl} with kind {self.kind}, which has one; expected impl tiled")
        return self


class EmbeddingTerm:
    """A term that follows the embeddings of a whole model.

    Attributes:
        digest: of the teacher's weights, for the identity of the run.
        teacher: None once its outputs are stored.
    """

    teacher: EmbeddingTeacher | None

    def __init__(self, config: DistillationConfig, name: str, student: CLIP):
        self.config, self.name, self.student, self.loss = config, name, student, DistillationLoss(config.impl)
        assert not isinstance(config.teacher, InitialTeacherConfig)
        self.teacher, self.digest = freeze(config.teacher.build(), student)
        self.scale = self.teacher.scale.detach().clone()

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
        origin = {"teacher": module_digest(teacher, json.dumps(teacher.origin, sort_keys=True))}

        def maker(modality: Modality, compute: Callable[[Tensor], Tensor], **others: Any) -> FeatureMaker:
            network = f"teacher of {self.name} ({modality}s)"
            return FeatureMaker(
                modality, network, lambda rows: compute(rows)[:, None], 1, width, self.scale.device, **others
            )

        return {
            f"{self.name}/image": maker("image", teacher.of_images, origin=origin | {"image_size": size}),
            f"{self.name}/text": maker("text", teacher.of_tokens, origin=origin, tokenize=teacher.vocabulary),
        }


class FeatureTerm:
    """A term that follows the features of a tower; see `EmbeddingTerm`."""

    teacher: ImageTower | TextTower | None

    def __init__(self, config: DistillationConfig, name: str, student: CLIP, seed: int):
        self.config, self.name = config, name
        self.modality: Modality = "image" if config.kind == "image_features" else "text"
        self.tokenizer: Tokenizer = getattr(student, self.modality)
        tower = self.tokenizer.tower
        if tower.is_frozen and not tower.first_step:
            raise ConfigError(
                f"got {config.kind} for a frozen tower (model.{self.modality}.tower.train: none), which cannot follow "
                "a teacher; expected a tower that trains, or no such term"
            )
        teacher, self._teacher_config = config.teacher.build_tower(self.modality, student)
        _require_same_tokens(teacher, tower)
        matrix = fixed_map(tower.width, teacher.width, seed)
        self.map = None if matrix is None else matrix.to(student.logit_scale.device)
        self.teacher, self.digest = freeze(teacher, student)

    def compare(self, out: CLIPOutput, samples: RankBatch) -> Stats:
        """Return the sum over this rank's tokens, and their count; see `compare_features`."""
        is_image = self.modality == "image"
        features, inputs = (out.image_features, samples.images) if is_image else (out.text_features, samples.tokens)
        assert features is not None
        if self.name in samples.features:  # stored
            wanted = samples.features[self.name]
            wanted = wanted if is_image else wanted[:, : inputs.shape[1]]
        else:
            assert self.teacher is not None
            with torch.no_grad():
                wanted = tower_features(self.teacher, inputs)
        return compare_features(features, wanted, None if is_image else self.tokenizer.mask(inputs), self.map)

    def makers(self) -> dict[str, FeatureMaker]:
        """Return the maker of the teacher's features; a frozen tower of a run with this tower has the same ones."""
        theirs, tower, resized = self.teacher, self.tokenizer.tower, {}
        assert theirs is not None
        if isinstance(tower, ImageTower) and isinstance(theirs, ImageTower) and tower.image_size != theirs.image_size:
            resized["image_size"] = tower.image_size  # of the pixels that are resized for the teacher
        network, compute = f"teacher of {self.name}", partial(tower_features, theirs)
        config, tokens = self._teacher_config, tower.num_tokens
        return {self.name: maker_for(self.tokenizer, theirs, config, network, compute, tokens, **resized)}


def fixed_map(student: int, teacher: int, seed: int) -> Tensor | None:
    """Return a matrix with orthonormal rows from the wider of two features to the narrower; None for equal widths.

    It is drawn by key and never trained: a run needs neither to save it nor to average its gradient.
    """
    rows, columns = sorted((student, teacher))
    if rows == columns:
        return None
    matrix = torch.empty(rows, columns, dtype=torch.float64)
    return nn.init.orthogonal_(matrix, generator=torch.Generator().manual_seed(seed))


def compare_features(features: Tensor, target: Tensor, mask: Tensor | None, matrix: Tensor | None) -> Stats:
    """Sum 1 - cosine over tokens. The cosine ignores the length of a feature, as the LayerNorm after a tower does.

    Args:
        features: ``(B, N, D)``.
        target: ``(B, N, D')`` of the teacher.
        mask: ``(B, N)``, True for the tokens that count; None for all.
        matrix: result of `fixed_map`, for other widths.

    Returns:
        This rank's ``sum``, differentiable, and ``count`` of tokens.
    """
    with full_precision(features.device):
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        mine, theirs = features.to(dtype), target.detach().to(dtype)
        if matrix is not None:
            matrix = matrix.to(dtype)
            mine, theirs = (x @ matrix.T if x.shape[-1] > len(matrix) else x for x in (mine, theirs))
        apart = 1 - F.cosine_similarity(mine, theirs, dim=-1)
        if mask is not None:
            apart = apart.where(mask, 0)
        count = torch.full((), apart.numel(), device=apart.device) if mask is None else mask.sum()
        return Stats({"sum": apart.sum(), "count": count})


class Distillation:
    """Terms of the loss that follow teachers. The constructor loads them to the model's device and dtype: a collective.

    Args:
        configs: the terms; none for a run without distillation.
        model: the student, with its initial weights.
        seed: run seed.

    Attributes:
        identity: settings and teachers that define the trajectory, with digests of the weights in place of their paths.

    Raises:
        ConfigError: on every rank, for a teacher that cannot be loaded or does not fit the student; names the key.
    """

    def __init__(self, configs: Sequence[DistillationConfig], model: CLIP, seed: int):
        self.terms: dict[str, EmbeddingTerm | FeatureTerm] = {}
        self.identity: list[dict[str, Any]] = []
        kinds = [config.kind for config in configs]
        with dist.raise_on_all_ranks() if configs else nullcontext():
            for number, config in enumerate(configs):
                turn = kinds[: number + 1].count(config.kind)
                name = config.kind if turn == 1 else f"{config.kind}_{turn}"
                term: EmbeddingTerm | FeatureTerm
                with _name_errors(f"distillation[{number}]"):
                    if config.kind == "embeddings":
                        term = EmbeddingTerm(config, name, model)
                    else:
                        term = FeatureTerm(config, name, model, derive_seed(seed, "distillation", name))
                settings = config.trajectory()
                self.identity.append(settings | {"teacher": settings["teacher"] | {"digest": term.digest}})
                self.terms[name] = term
        if configs and (others := dist.differing_ranks([term.digest for term in self.terms.values()])):
            raise ConfigError(
                f"distillation: rank {', '.join(others)} loaded other teachers than rank 0; expected the same files on "
                "every machine"
            )

    def compares_features(self, step: int) -> bool:
        """Return whether `compare` needs the towers' features in step number ``step``."""
        return any(isinstance(term, FeatureTerm) for term in self._terms_at(step))

    def compare(self, out: CLIPOutput, samples: RankBatch, step: int) -> dict[str, Stats]:
        """Compare features of tokens; return the sums of this rank as ``distillation/<term>``.

        Args:
            out: of the model, with the towers' features.
            samples: in a microbatch of this rank.
            step: number of the step.
        """
        terms = [term for term in self._terms_at(step) if isinstance(term, FeatureTerm)]
        return {f"distillation/{term.name}": term.compare(out, samples) for term in terms}

    def losses(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        sums: Mapping[str, Stats],
        parts: Sequence[RankBatch],
        step: int,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the unweighted terms of this step over the global batch, and their weights. A collective.

        Args:
            image: ``(B, E)`` embeddings of all samples of this rank.
            text: ``(B, E)`` of their captions.
            scale: () of the logits.
            sums: those of `compare`, of all ranks.
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
                terms[key] = sums[key]["sum"] / sums[key]["count"]
        return terms, weights

    def _terms_at(self, step: int) -> list[EmbeddingTerm | FeatureTerm]:
        ends = ((term, term.config.until_step) for term in self.terms.values())
        return [term for term, end in ends if end is None or step < end]


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
    if type(theirs) is not type(mine) or theirs.files() != mine.files() or theirs.description != mine.description:
        raise ConfigError(
            f"teacher: got the vocabulary {theirs.description!r}; the student has {mine.description!r}; expected the "
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
