"""Configuration tree of a contrastive run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import model_validator

from vqclip import dist
from vqclip.config import Modality
from vqclip.losses import LossConfig
from vqclip.model import CLIP, ModelConfig
from vqclip.pixels.losses import PixelLosses, require_starts
from vqclip.towers.training import FromStep
from vqclip.train.config import TaskConfig
from vqclip.train.distillation import Distillation, DistillationConfig, DistillationTerm
from vqclip.train.feature_jobs import FeatureMaker, tower_maker
from vqclip.train.tasks.base import Task
from vqclip.train.tasks.contrastive import ContrastiveTask, towers_draw

__all__ = ["TrainConfig"]

logger = logging.getLogger(__name__)


class TrainConfig(TaskConfig):
    """Whole configuration of a contrastive run."""

    task: Literal["contrastive"] = "contrastive"
    """Contrastive training of an image and a text tokenizer."""
    model: ModelConfig
    """The two tokenizers."""
    loss: LossConfig
    """The loss over the global batch."""
    distillation: tuple[DistillationConfig, ...] = ()
    """Further terms of the loss, which follow frozen teachers."""

    @model_validator(mode="after")
    def _loss_and_temperature_fit(self) -> TrainConfig:
        needs, has = self.loss.needs_bias, self.model.temperature.bias is not None
        if needs and not has:
            raise ValueError(
                f"loss.kind {self.loss.kind!r} needs model.temperature.bias (SigLIP starts at -10); got null"
            )
        if has and not needs:
            raise ValueError(
                f"loss.kind {self.loss.kind!r} does not use model.temperature.bias; got {self.model.temperature.bias}, "
                "expected null"
            )
        return self

    @model_validator(mode="after")
    def _towers_train_within_the_run(self) -> TrainConfig:
        for name in ("image", "text"):
            train = getattr(self.model, name).tower.train
            if isinstance(train, FromStep) and train.from_step >= self.train.steps:
                raise ValueError(
                    f"model.{name}.tower.train.from_step: got {train.from_step}, but the run has {self.train.steps} "
                    "steps; expected fewer, or `train: none`"
                )
        return self

    def has_codes(self) -> bool:
        """Return whether both tokenizers have codes."""
        return "identity" not in (self.model.image.quantizer.kind, self.model.text.quantizer.kind)

    @model_validator(mode="after")
    def _stored_features_are_of_frozen_towers(self) -> TrainConfig:
        needs_pixels = [
            term.kind for term in self.distillation if term.kind != "text_features" and not self.stores_teacher(term)
        ]
        if "image" in self.cached_modalities and needs_pixels:
            raise ValueError(
                f"data.feature_cache.teachers: got false with a distillation term of kind {needs_pixels[0]}, whose "
                "teacher needs images, which stored image features replace; expected true, or modalities: [text]"
            )
        return self

    @model_validator(mode="after")
    def _pixels_are_decoded_within_the_run(self) -> TrainConfig:
        if (pixels := self.model.image.pixels) is None:
            return self
        key = "model.image.pixels"
        for name, got, most in (
            ("start_step", pixels.start_step, self.train.steps - 1),
            ("one_in", pixels.one_in, self.train.batch_size),
        ):
            if got > most:
                raise ValueError(
                    f"{key}.{name}: got {got}; expected at most {most} in a run of {self.train.steps} "
                    f"steps of {self.train.batch_size} samples"
                )
        require_starts(pixels.losses, self.train.steps, f"{key}.losses")
        if "image" in self.cached_modalities:
            raise ValueError(
                f"{key}: got a pixel decoder with data.feature_cache, whose stored image features replace the images "
                "that it learns from; expected modalities: [text] there, or no feature cache"
            )
        return self

    def build_task(self, device: torch.device, dtype: torch.dtype) -> ContrastiveTask:
        """Build the model with the weights of the first step, and all that trains it. A collective.

        Weights that are not pretrained are drawn from torch's global generator.
        """
        model = self.model.build()
        if model.inherited is not None:
            logger.info("%s", model.inherited.describe())
        model = model.to(device, dtype)
        distillation = Distillation.build(self.distillation, model, self.run.seed)
        losses = None
        if (pixels := self.model.image.pixels) is not None:
            size, key = model.image.tower.image_size, "model.image.pixels.losses"
            losses = PixelLosses.build(pixels.losses, size, self.run.seed, key).to(device, dtype)
        return ContrastiveTask(model, self.loss.build(), self.train.bottleneck, distillation, losses)

    def feature_makers(self, task: Task[Any]) -> dict[str, FeatureMaker]:
        """Return a maker for each network whose outputs are stored before the first step, by name."""
        assert isinstance(task, ContrastiveTask)
        tokenizers, distillation = task.tokenizers, task.distillation
        makers: dict[str, FeatureMaker] = {
            modality: tower_maker(tokenizers[modality]) for modality in self.cached_modalities
        }
        return makers | ({} if distillation is None else distillation.makers(self.stores_teacher))

    def release_stored(self, task: Task[Any]) -> None:
        """Drop the networks whose outputs batches contain from now on."""
        assert isinstance(task, ContrastiveTask)
        if task.distillation is not None:
            task.distillation.release_teachers(self.stores_teacher)

    def run_identity(self, task: Task[Any], samples: dict[str, Any]) -> dict[str, object]:
        """Return `identity` with what only the built model tells.

        Args:
            task: with the weights of the first step.
            samples: fingerprint of the data.
        """
        assert isinstance(task, ContrastiveTask)
        return self.identity(
            samples,
            towers_draw=towers_draw(task.model),
            distillation=[] if task.distillation is None else task.distillation.identity,
            pixel_losses=[] if task.reconstruction is None else task.reconstruction.losses.identity,
            read=self.settings_from_folders(task.model),
        )

    def stores_teacher(self, term: DistillationTerm) -> bool:
        """Return whether all that a term's teacher computes is stored before the first step."""
        cache = self.data.feature_cache
        repeats = self.data.views is not None or term.kind == "text_features"
        return cache is not None and cache.teachers and repeats

    @property
    def cached_modalities(self) -> tuple[Modality, ...]:
        """Modalities whose towers' features are stored before the first step."""
        if self.data.feature_cache is None:
            return ()
        training: dict[Modality, object] = {"image": self.model.image.tower.train, "text": self.model.text.tower.train}
        alone = not any(self.stores_teacher(term) for term in self.distillation)
        return self.data.feature_cache.choose(training, self.data.views, alone=alone)

    def identity(
        self,
        samples: dict[str, Any],
        *,
        towers_draw: bool,
        distillation: Sequence[dict[str, Any]] = (),
        pixel_losses: Sequence[dict[str, Any]] = (),
        read: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> dict[str, object]:
        """Return the settings that define the trajectory: they must be the same when a run resumes.

        If the towers draw random numbers, the numbers of processes and of microbatches are among them, because every
        rank draws for each of its microbatches. See also `shared_identity`.

        Args:
            samples: fingerprint of the data.
            towers_draw: whether the towers contain dropout, stochastic depth or similar modules.
            distillation: its terms with digests of their teachers.
            pixel_losses: those of `model.image.pixels` with digests of their networks.
            read: result of `settings_from_folders`.
        """
        own = {
            "model": self.model.model_dump(mode="json", exclude={"image": {"pixels": {"losses"}}}),
            "model.image.pixels.losses": list(pixel_losses),  # with digests of their networks in place of paths
            "loss": self.loss.model_dump(mode="json"),
            "distillation": list(distillation),
        }
        settings = self.shared_identity(samples | self._stored_values(), own)
        by_rank = {
            "processes (dropout is drawn by rank)": dist.world_size(),
            "train.micro_batches (dropout is drawn by micro-batch)": self.train.micro_batches,
        }
        settings |= {f"model.{modality}.tower (from its folder)": found for modality, found in read.items()}
        return settings | (by_rank if towers_draw else {})

    def settings_from_folders(self, model: CLIP) -> dict[str, dict[str, Any]]:
        """Return, for each modality, the settings of its tower that are not in the configuration, but in files.

        Files can change between a run and its resumption, while the configuration that names them stays.

        Args:
            model: built from this configuration.
        """
        found: dict[str, dict[str, Any]] = {}
        for modality in ("image", "text"):
            tokenizer = getattr(model, modality)
            given = getattr(self.model, modality).tower.model_dump(mode="json")
            complete = tokenizer.config.tower.model_dump(mode="json")
            files = {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files().items()}
            if settings := {name: value for name, value in complete.items() if value != given[name]} | files:
                found[modality] = settings
        return found

    def _stored_values(self) -> dict[str, Any]:
        """Return the settings of stored features that change values; absent where they change none."""
        found: dict[str, Any] = {}
        cache = self.data.feature_cache
        if cache is not None and (cache.dtype != "fp32" or self.train.precision == "fp64"):
            found["feature_cache"] = {"dtype": cache.dtype, "modalities": list(self.cached_modalities)}
            if teachers := [term.kind for term in self.distillation if self.stores_teacher(term)]:
                found["feature_cache"]["teachers"] = teachers
        return found
