"""Configuration tree of a run; the class of each section is next to the class that it builds."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

from vqclip import dist
from vqclip.config import Config, to_yaml
from vqclip.data import DataConfig, mask_credentials
from vqclip.data.features import Modality
from vqclip.data.order import FullOrder
from vqclip.data.remote import TransferConfig
from vqclip.evaluation import Evaluations, scalar_names
from vqclip.io.cache import cache_folder
from vqclip.losses import LossConfig
from vqclip.model import CLIP, ModelConfig
from vqclip.pixels.losses import PixelLosses, require_starts
from vqclip.runlog.best import PREFIX
from vqclip.runlog.trackers import RunFacts, TensorBoardConfig, Trackers, hyperparameters
from vqclip.towers.training import FromStep
from vqclip.train.bottleneck import BottleneckConfig
from vqclip.train.distillation import Distillation, DistillationConfig, DistillationTerm
from vqclip.train.ema import EmaConfig
from vqclip.train.feature_makers import FeatureMaker, tower_maker
from vqclip.train.guards import GuardConfig
from vqclip.train.optim import OptimConfig
from vqclip.train.report import ReportConfig
from vqclip.train.run_store import require_writable
from vqclip.train.step import ComputeConfig
from vqclip.train.tasks.base import Task
from vqclip.train.tasks.contrastive import ContrastiveTask, towers_draw

__all__ = ["RunConfig", "ScheduleConfig", "TaskConfig", "TrainConfig"]

logger = logging.getLogger(__name__)


class RunConfig(Config):
    """Folder, seed, device and time limits of a run."""

    name: str = Field("base", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `folder/name`."""
    folder: Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given)] = "runs"
    """Folder of all runs: on a disk that rank 0 sees, or a URL of s3, gs or az. A run at a URL has a copy in `runs` of
    the cache folder of rank 0's machine, which it works on."""
    remote: TransferConfig = TransferConfig(total_s=600.0)
    """Transfers of a run folder at a URL."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest intact checkpoint if there is one. never: refuse a folder that has checkpoints."""
    resume_allow: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint, by the names in the error, such as `train.steps`, or a common
    beginning of several, such as `data`. The resumed run is then not the one that was interrupted."""
    seed: int = Field(0, ge=0)
    """Key of every random draw: weights, sample order, augmentation, dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available, else cpu."""
    timeout_s: float = Field(600.0, gt=0, le=604_800)
    """Longest wait for another rank, in seconds, at most a week; then the job ends with an error. It includes the
    time in which rank 0 fetches a checkpoint of a run at a URL."""
    step_timeout_s: float | None = Field(300.0, gt=0, le=604_800)
    """Longest time between two steps in seconds, waiting for data included. Then the job ends, and every rank writes
    its stacks and last collectives to the run's folder. The first five steps, evaluation and saving have `timeout_s`,
    which is also an upper bound of this limit. null: no watchdog."""

    peak_tflops: float | None = Field(None, gt=0, le=1e6)
    """Most TFLOP/s of a process's device in the precision of the run, from its data sheet, such as 989 (H100 SXM, bf16,
    dense): the metrics then include `mfu`, model FLOPs utilisation."""
    trackers: Trackers = (TensorBoardConfig(),)
    """Programs that keep and draw the metrics, beside `metrics.jsonl`: names such as `tensorboard`, `wandb` and
    `trackio`, or mappings with settings, such as `{kind: wandb, project: mine}`."""

    @field_validator("folder")
    @classmethod
    def _folder_can_be_written(cls, folder: str) -> str:
        return require_writable(folder)

    @property
    def url(self) -> str | None:
        """URL of the run; None if its folder is on a disk."""
        return f"{self.folder}/{self.name}" if "://" in self.folder else None

    @property
    def path(self) -> Path:
        """Folder of the run on this machine."""
        if self.url is None:
            return Path(self.folder, self.name)
        return cache_folder() / "runs" / hashlib.sha256(self.folder.encode()).hexdigest()[:16] / self.name


class ScheduleConfig(ComputeConfig):
    """Length of the training, checkpoints, evaluations, and the computation of a step."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps of the run."""
    batch_size: int = Field(256, ge=2, le=2**24)
    """G, samples of one optimizer step over all ranks."""
    report_every: int = Field(20, ge=1)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(500, ge=1)
    """Steps between two checkpoints; the last step is always one."""
    save_in_background: bool = True
    """Write checkpoints during the next steps, from a copy in host memory; false: the training waits."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of recent checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep the checkpoints after every `keep_every` steps; a multiple of `checkpoint_every`."""
    keep_best: str | None = None
    """Also keep the checkpoint that is best by a metric of `evaluation`, named as in `metrics.jsonl`, such as
    `eval/unseen images/codes_only/top1`; `evaluate_every` must then be a multiple of `checkpoint_every`."""
    evaluate_every: int | None = Field(None, ge=1)
    """Steps between two evaluations during training; null: only at the end."""
    export: Literal["last", "best"] = "last"
    """Step whose tokenizer is exported and summarised at the end; best: the step of `keep_best`."""
    ema: EmaConfig | None = None
    """Moving average of the weights, which evaluations and exports use; null: the weights of the last step."""
    bottleneck: BottleneckConfig | None = None
    """Steps at the beginning in which the embedding sees continuous vectors; null: codes from the first step."""

    @model_validator(mode="after")
    def _what_is_kept_is_saved(self) -> ScheduleConfig:
        for name, every in (("keep_every", self.keep_every), ("evaluate_every", self.evaluate_every)):
            needed = name == "keep_every" or self.keep_best is not None
            if needed and every is not None and every % self.checkpoint_every:
                raise ValueError(f"got {name} {every}; expected a multiple of checkpoint_every {self.checkpoint_every}")
        if self.keep_best is not None and self.evaluate_every is None:
            raise ValueError(f"got keep_best {self.keep_best!r} and evaluate_every null; expected a number of steps")
        if self.export == "best" and self.keep_best is None:
            raise ValueError("got export 'best' and keep_best null; expected keep_best to name a figure")
        if self.bottleneck is not None and self.bottleneck.steps >= self.steps:
            raise ValueError(
                f"got {self.bottleneck.steps} steps of bottleneck (open_steps + close_steps); expected fewer than the "
                f"{self.steps} steps of the run, which must end with the codes"
            )
        return self


class TaskConfig(Config):
    """Whole configuration of a run: what all tasks have. Each task adds its own keys."""

    if TYPE_CHECKING:
        task: Any
    run: RunConfig = RunConfig()
    """Folder, seed, device and time limits."""
    data: DataConfig
    """Samples to train on."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning rate."""
    train: ScheduleConfig = ScheduleConfig()
    """Length, checkpoints and precision of the training."""
    guards: GuardConfig = GuardConfig()
    """Settings of the checks of every step."""
    evaluation: Evaluations = ()
    """Evaluations at the end, and every `train.evaluate_every` steps."""
    report: ReportConfig | None = ReportConfig()
    """Files for people to look at, made at every evaluation; null: none."""

    _owners: ClassVar[dict[str, str]] = {}
    """Key that not all tasks have → a task that has it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Note the keys of a task, for messages."""
        own = cls.model_fields.keys() - TaskConfig.model_fields.keys() - {"task"}
        cls._owners.update(dict.fromkeys(own, cls.model_fields["task"].default))

    @model_validator(mode="before")
    @classmethod
    def _has_no_key_of_another_task(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                owner = cls._owners.get(key)
                if key not in cls.model_fields and owner is not None:
                    raise ValueError(
                        f"got {key}, which belongs to task: {owner}, with task: {cls.model_fields['task'].default}; "
                        "expected another task, or no such key"
                    )
        return values

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are trained."""
        return torch.float64 if self.train.precision == "fp64" else torch.float32

    def build_task(self, device: torch.device, dtype: torch.dtype) -> Task[Any]:
        """Build the task with the weights of the first step, which are drawn from torch's generator. A collective.

        Args:
            device: of the run.
            dtype: of the weights that are trained.
        """
        raise NotImplementedError

    def feature_makers(self, task: Any) -> dict[str, FeatureMaker]:
        """Return a maker for each network whose outputs are stored before the first step, by name."""
        raise NotImplementedError

    def release_stored(self, task: Any) -> None:
        """Drop the networks whose outputs batches contain from now on."""

    def run_identity(self, task: Any, samples: dict[str, Any]) -> dict[str, object]:
        """Return the settings that define the trajectory; checkpoints with other ones are refused.

        Args:
            task: with the weights of the first step.
            samples: fingerprint of the data.
        """
        raise NotImplementedError

    def has_codes(self) -> bool:
        """Return whether the image and the text tokenizer have codes."""
        return True

    def shared_identity(self, samples: dict[str, Any], own: Mapping[str, object]) -> dict[str, object]:
        """Return the part of the identity that all tasks have, around that of a task.

        Settings that only change the rounding (device, compilation, kernels) are not among them, nor are the guards, so
        that a run which they have stopped can resume. Neither are the numbers of processes and of microbatches.

        Args:
            samples: fingerprint of the data.
            own: settings of the task.
        """
        reading = self.data.model_dump(mode="json", include={"transform", "max_pixels"})
        views = {} if self.data.views is None else {"views": self.data.views}
        settings: dict[str, object] = {
            "run.seed": self.run.seed,
            "train.steps": self.train.steps,
            "train.batch_size": self.train.batch_size,
            "train.precision": self.train.precision,
            "data": samples | reading | views,
            **own,
            "optim": self.optim.model_dump(mode="json", exclude={"implementation", *_names_without_effect(self.optim)}),
        }
        # Absent where they are null: checkpoints from before these settings resume.
        if not isinstance(self.data.order, FullOrder):
            settings["data.order"] = self.data.order.model_dump(mode="json")
        for name in ("ema", "bottleneck"):
            section = getattr(self.train, name)
            if section is not None:
                settings[f"train.{name}"] = section.model_dump(mode="json", exclude={"evaluate"})
        return settings

    def facts(self) -> RunFacts:
        """Return what trackers show of this run, with credentials masked."""
        codes = self.has_codes()
        mode = "/codes_only/" if codes else "/quantized/"
        final = [f"{PREFIX}{name}" for name in scalar_names(self.evaluation, codes=codes) if mode in name]
        return RunFacts(
            name=self.run.name,
            folder=self.run.path,
            config=mask_credentials(to_jsonable_python(self.model_dump())),
            text=to_yaml(self, mask_credentials),
            hyperparameters=hyperparameters(self),
            final=("train/loss/total", *final),
        )

    @model_validator(mode="after")
    def _warmup_is_shorter_than_the_run(self) -> Self:
        self.optim.schedule(self.train.steps)
        return self

    @model_validator(mode="after")
    def _best_is_a_figure(self) -> Self:
        names = [f"{PREFIX}{name}" for name in scalar_names(self.evaluation, codes=self.has_codes())]
        if self.train.keep_best not in (None, *names):
            expected = f"one of {', '.join(names)}" if names else "null, as evaluation is empty"
            raise ValueError(f"train.keep_best: got {self.train.keep_best!r}; expected {expected}")
        return self


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
        return makers | ({} if distillation is None else distillation.makers(task.model, self.stores_teacher))

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
            "model": _without_defaults(self.model.model_dump(mode="json")),
            "loss": self.loss.model_dump(mode="json"),
        }
        settings = self.shared_identity(samples | self._stored_values(), own)
        by_rank = {
            "processes (dropout is drawn by rank)": dist.world_size(),
            "train.micro_batches (dropout is drawn by micro-batch)": self.train.micro_batches,
        }
        if distillation:  # absent without terms: the checkpoints of former versions resume
            settings["distillation"] = list(distillation)
        if pixel_losses:  # likewise
            settings["model.image.pixels.losses"] = list(pixel_losses)
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


def _names_without_effect(optim: OptimConfig) -> set[str]:
    """Return the settings of single parameters that change nothing; checkpoints from before them resume."""
    return {name for name in ("layer_decay", "overrides") if not getattr(optim, name)}


def _without_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Remove the defaults of `tower.train` and `image.pixels`, so that checkpoints from before them still fit.

    The losses on pixels have an entry of their own, with digests of their networks in place of paths.
    """
    if model["image"]["pixels"] is None:
        del model["image"]["pixels"]
    else:
        del model["image"]["pixels"]["losses"]
    for modality in ("image", "text"):
        tower = model[modality]["tower"]
        model[modality]["tower"] = {key: value for key, value in tower.items() if (key, value) != ("train", "all")}
    return model
