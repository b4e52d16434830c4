"""All terms of distillation of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Modality
from vqclip.errors import ConfigError, NonFiniteError, VqclipError
from vqclip.io.tensors import module_digest
from vqclip.losses import DistillationLoss
from vqclip.model import CLIP
from vqclip.quantizers import Stats
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers import ImageTower, TextTower
from vqclip.train.distillation.config import (
    DistillationConfig,
    DistillationTerm,
    EmbeddingDistillationConfig,
    FeatureDistillationConfig,
)
from vqclip.train.distillation.features import ComparedCLIP, FeatureComparison
from vqclip.train.distillation.teachers import (
    EmbeddingTeacher,
    TeacherTower,
    build_embedding_teacher,
    build_tower,
    freeze,
    tower_features,
)
from vqclip.train.feature_makers import FeatureMaker, tower_origin, vocabulary_origin


class Samples(Protocol):
    """Samples of this rank, on the device."""

    @property
    def images(self) -> Tensor:
        """``(B, 3, H, W)`` uint8."""

    @property
    def tokens(self) -> Tensor:
        """``(B, N)`` of the student's vocabulary."""

    @property
    def captions(self) -> tuple[str, ...]:
        """B captions."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Samples of every rank in the global batch; None if they are not known."""

    @property
    def features(self) -> Mapping[str, Tensor]:
        """Stored outputs of teachers, by the names of `Distillation.makers`."""


@dataclass(frozen=True)
class _EmbeddingTerm:
    config: EmbeddingDistillationConfig
    teacher: EmbeddingTeacher | None
    """None once its outputs are stored."""
    loss: DistillationLoss
    scale: Tensor
    digest: str

    def makers(self, name: str, student: CLIP) -> dict[str, FeatureMaker]:
        """Return the makers of the teacher's embeddings, one token a sample."""
        teacher, size = self.teacher, student.image.tower.image_size
        assert teacher is not None
        with torch.no_grad():
            width = teacher.of_images(torch.zeros(1, 3, size, size, device=self.scale.device)).shape[-1]

        found = module_digest(teacher, json.dumps(teacher.describe(), sort_keys=True))

        def maker(modality: Modality, embed: Callable[[Tensor], Tensor], **others: Any) -> FeatureMaker:
            origin = {"teacher": found} | ({"image_size": size} if modality == "image" else {})
            what = f"teacher of {name} ({modality}s)"
            return FeatureMaker(
                modality, what, lambda rows: embed(rows)[:, None], 1, width, self.scale.device, origin, **others
            )

        images = maker("image", teacher.of_images)
        return {f"{name}/image": images, f"{name}/text": maker("text", teacher.of_tokens, tokenize=teacher.vocabulary)}


@dataclass(frozen=True)
class _FeatureTerm:
    config: FeatureDistillationConfig
    modality: Modality
    teacher: TeacherTower | None
    """None once its outputs are stored."""
    comparison: FeatureComparison
    digest: str

    def makers(self, name: str, student: CLIP) -> dict[str, FeatureMaker]:
        """Return the maker of the teacher's features; a frozen tower of a run with this tower has the same ones."""
        tokenizer: Tokenizer = getattr(student, self.modality)
        assert self.teacher is not None
        tower, theirs = tokenizer.tower, self.teacher.tower
        origin = tower_origin(theirs, self.teacher.config) | vocabulary_origin(tokenizer)
        if isinstance(tower, ImageTower) and isinstance(theirs, ImageTower) and tower.image_size != theirs.image_size:
            origin["image_size"] = tower.image_size  # of the pixels that are resized for the teacher
        return {
            name: FeatureMaker(
                modality=self.modality,
                network=f"teacher of {name}",
                compute=partial(tower_features, theirs),
                tokens=tower.num_tokens,
                width=theirs.width,
                device=tokenizer.device,
                origin=origin,
                tokenize=tokenizer.preprocess if isinstance(tokenizer, TextTokenizer) else None,
            )
        }


class Distillation:
    """Terms of the loss that follow teachers.

    Teachers are no part of the model: they have no gradient, no optimizer state, and are not saved.
    """

    def __init__(self, terms: Mapping[str, _EmbeddingTerm | _FeatureTerm]):
        self._terms = dict(terms)
        self.identity = [term.config.identity(term.digest) for term in terms.values()]
        """Settings and teachers that define the trajectory."""
        self.ends = {term.config.until_step for term in terms.values()}
        """First steps without a term; None for one that stays."""
        self._checked: set[str] = set()

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
        terms: dict[str, _EmbeddingTerm | _FeatureTerm] = {}
        loaded: dict[str, tuple[EmbeddingTeacher, str]] = {}
        with dist.raise_on_all_ranks():
            for number, (name, config) in enumerate(zip(_names(configs), configs, strict=True)):
                with _name_errors(f"distillation[{number}]"):
                    if isinstance(config, EmbeddingDistillationConfig):
                        terms[name] = _embedding_term(config, model, loaded)
                    else:
                        terms[name] = _feature_term(config, model, derive_seed(seed, "distillation", name))
        _require_same([term.digest for term in terms.values()])
        return Distillation(terms)

    @property
    def _embeddings(self) -> dict[str, _EmbeddingTerm]:
        return {name: term for name, term in self._terms.items() if isinstance(term, _EmbeddingTerm)}

    @property
    def _features(self) -> dict[str, _FeatureTerm]:
        return {name: term for name, term in self._terms.items() if isinstance(term, _FeatureTerm)}

    def makers(self, student: CLIP, stores: Callable[[DistillationTerm], bool]) -> dict[str, FeatureMaker]:
        """Return the makers of what the teachers compute for the terms that ``stores`` chooses, by name."""
        chosen = {name: term for name, term in self._terms.items() if stores(term.config)}
        return {key: maker for name, term in chosen.items() for key, maker in term.makers(name, student).items()}

    def release_teachers(self, stores: Callable[[DistillationTerm], bool]) -> None:
        """Forget the teachers of the terms that ``stores`` chooses: batches contain what they would compute."""
        for name, term in self._terms.items():
            if stores(term.config):
                self._terms[name] = replace(term, teacher=None)

    def wrap(self, model: CLIP) -> nn.Module:
        """Return the module that trains: ``model``, or one that compares its features and takes `targets` too."""
        if not self._features:
            return model
        comparisons = {name: term.comparison for name, term in self._features.items()}
        return ComparedCLIP(model, comparisons, {name: term.modality for name, term in self._features.items()})

    @torch.no_grad()
    def targets(self, samples: Samples, step: int) -> tuple[dict[str, Tensor], ...]:
        """Return the further arguments of the wrapped module: teachers' features by term, of the terms of this step.

        Args:
            samples: in a microbatch of this rank.
            step: number of the step.
        """
        if not self._features:
            return ()
        found = {}
        for name, term in self._features.items():
            if term.config.weight_at(step):
                found[name] = self._follow(name, term, samples)
                self._require_finite(name, found[name])
        return (found,)

    def losses(
        self, image: Tensor, text: Tensor, scale: Tensor, sums: Stats, parts: Sequence[Samples], step: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the unweighted terms of this step over the global batch, and their weights. A collective.

        Args:
            image: ``(B, E)`` embeddings of all samples of this rank.
            text: ``(B, E)`` of their captions.
            scale: () of the logits.
            sums: of all ranks, from `separate_sums`.
            parts: the samples in the parts in which the teachers run.
            step: number of the step.
        """
        terms = {}
        for name, term in self._embeddings.items():
            if term.config.weight_at(step):
                images, texts = self._embed(name, term, parts)
                terms[name] = term.loss(image, text, scale, images, texts, term.scale, parts[0].sizes)
        for name in self._features:
            if f"{name}/sum" in sums:
                terms[name] = sums[f"{name}/sum"] / sums[f"{name}/count"]
        weights = {name: self._terms[name].config.weight_at(step) for name in terms}
        start = "distillation/"
        return {start + name: term for name, term in terms.items()}, {start + name: w for name, w in weights.items()}

    def _follow(self, name: str, term: _FeatureTerm, samples: Samples) -> Tensor:
        """Return a teacher's features ``(B, N, D)``, from the feature cache or computed."""
        inputs = samples.images if term.modality == "image" else samples.tokens
        if name in samples.features:
            found = samples.features[name]
            return found if term.modality == "image" else found[:, : inputs.shape[1]]
        assert term.teacher is not None
        return tower_features(term.teacher.tower, inputs)

    def _embed(self, name: str, term: _EmbeddingTerm, parts: Sequence[Samples]) -> tuple[Tensor, Tensor]:
        """Return a teacher's embeddings ``(B, F)``, from the feature cache or computed."""
        pairs = []
        for part in parts:
            if f"{name}/image" in part.features:
                pairs.append((part.features[f"{name}/image"][:, 0], part.features[f"{name}/text"][:, 0]))
            else:
                assert term.teacher is not None
                pairs.append(term.teacher(part.images, part.captions))
        images, texts = (torch.cat(each) for each in zip(*pairs, strict=True))
        self._require_finite(name, torch.cat((images, texts)))
        return images, texts

    def _require_finite(self, name: str, found: Tensor) -> None:
        """Check a teacher's first output, on every rank; the guards check every later loss."""
        if name in self._checked:
            return
        self._checked.add(name)
        if dist.any_rank(not bool(found.isfinite().all())):
            raise NonFiniteError(
                f"distillation: the outputs of the teacher of {name!r} contain NaN or infinity; use another teacher, "
                "or train.precision: bf16 or fp32"
            )


def _embedding_term(
    config: EmbeddingDistillationConfig, model: CLIP, loaded: dict[str, tuple[EmbeddingTeacher, str]]
) -> _EmbeddingTerm:
    key = config.teacher.model_dump_json()
    if key not in loaded:
        teacher = build_embedding_teacher(config.teacher)
        freeze(teacher)
        loaded[key] = teacher, module_digest(teacher)  # before its dtype changes
    teacher, found = loaded[key]
    teacher.to(model.logit_scale.device, model.logit_scale.dtype)
    return _EmbeddingTerm(config, teacher, DistillationLoss(config.impl), teacher.scale.detach().clone(), found)


def _feature_term(config: FeatureDistillationConfig, model: CLIP, seed: int) -> _FeatureTerm:
    modality: Modality = "image" if config.kind == "image_features" else "text"
    student: ImageTower | TextTower = getattr(model, modality).tower
    if student.is_frozen and not student.first_step:
        raise ConfigError(
            f"got {config.kind} for a frozen tower (model.{modality}.tower.train: none), which cannot follow a "
            "teacher; expected a tower that trains, or no such term"
        )
    built = build_tower(config.teacher, modality, model)
    teacher = built.tower
    freeze(teacher)
    if isinstance(teacher, TextTower):
        assert isinstance(student, TextTower)
        _require_same_tokens(teacher, student)
    elif teacher.num_tokens != student.num_tokens:
        raise ConfigError(
            f"teacher: got {teacher.num_tokens} patches an image; the student has {student.num_tokens}; expected as "
            "many: another image_size or patch size of model.image.tower, or kind: embeddings"
        )
    comparison = FeatureComparison(student.width, teacher.width, seed).to(model.logit_scale.device)
    found = module_digest(teacher)
    teacher.to(model.logit_scale.device, model.logit_scale.dtype)
    return _FeatureTerm(config, modality, built, comparison, found)


def _require_same_tokens(teacher: TextTower, student: TextTower) -> None:
    """Check that a teacher can read the student's token numbers."""
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


def _names(configs: Sequence[DistillationConfig]) -> list[str]:
    """Name the terms by their kinds, repeated ones with a number."""
    kinds = [config.kind for config in configs]
    turns = [kinds[: number + 1].count(kind) for number, kind in enumerate(kinds)]
    return [kind if turn == 1 else f"{kind}_{turn}" for kind, turn in zip(kinds, turns, strict=True)]


@contextmanager
def _name_errors(key: str) -> Iterator[None]:
    """Raise errors of a teacher as ConfigError with the key path of its term."""
    try:
        yield
    except VqclipError as error:
        text = str(error)
        for start in ("tower.model", "tower.pretrained", "tower.checkpoint", "tower"):
            if text.startswith(start):
                text = f"teacher{text.removeprefix('tower')}"
                break
        raise ConfigError(f"{key}{'.' if text.startswith('teacher') else ': '}{text}") from error


def _require_same(digests: list[str]) -> None:
    if others := dist.differing_ranks(digests):
        raise ConfigError(
            f"distillation: rank {', '.join(others)} loaded other teachers than rank 0; expected the same files on "
            "every machine"
        )
