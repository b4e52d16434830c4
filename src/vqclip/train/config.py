"""Configuration tree of a run; the class of each section is next to the class that it builds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python
from typing_extensions import Self

from vqclip.config import FREE, Config, Modality, to_yaml
from vqclip.data import DataConfig, mask_credentials
from vqclip.data.remote.files import require_writable
from vqclip.data.remote.retry import TransferConfig
from vqclip.evaluation import DetailsConfig, Evaluations, scalar_names
from vqclip.io.files import cache_folder
from vqclip.model import CLIP
from vqclip.runlog.metrics import EVALUATION
from vqclip.runlog.trackers import RunFacts, TensorBoardConfig, Trackers
from vqclip.tokenizer import Tokenizer
from vqclip.train.ema import EmaConfig
from vqclip.train.feature_cache import FeatureMaker
from vqclip.train.guards import GuardConfig
from vqclip.train.optim import ELEMENTWISE, OptimConfig, Schedule
from vqclip.train.step import ComputeConfig
from vqclip.train.tasks.base import Task


class RunConfig(Config):
    """Folder, seed, device and time limits of a run."""

    name: Annotated[str, FREE] = Field("base", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `folder/name`."""
    folder: Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path), FREE] = "runs"
    """Folder of all runs: on a disk that rank 0 sees, or a URL of s3, gs or az. A run at a URL has a copy in `runs` of
    the cache folder of rank 0's machine, which it works on."""
    remote: Annotated[TransferConfig, FREE] = TransferConfig(total_s=600.0)
    """Transfers of a run folder at a URL."""
    resume: Annotated[Literal["auto", "never"], FREE] = "auto"
    """auto: resume from the newest intact checkpoint if there is one. never: refuse a folder that has checkpoints."""
    resume_allow: Annotated[tuple[str, ...], FREE] = ()
    """Settings that may differ from the checkpoint, by the names in the error, such as `train.steps`, or a common
    beginning of several, such as `data`. The resumed run is then not the one that was interrupted."""
    seed: int = Field(0, ge=0)
    """Key of every random draw: weights, sample order, augmentation, dropout."""
    device: Annotated[Literal["auto", "cpu", "cuda"], FREE] = "auto"
    """auto: cuda if available, else cpu."""
    timeout_s: Annotated[float, FREE] = Field(600.0, gt=0, le=604_800)
    """Longest wait for another rank, in seconds, at most a week; then the job ends with an error. It includes the
    time in which rank 0 fetches a checkpoint of a run at a URL."""
    step_timeout_s: Annotated[float | None, FREE] = Field(300.0, gt=0, le=604_800)
    """Longest time between two steps in seconds, waiting for data included. Then the job ends, and every rank writes
    its stacks and last collectives to the run's folder. The first five steps, evaluation and saving have `timeout_s`,
    which is also an upper bound of this limit. null: no watchdog."""
    peak_tflops: Annotated[float | None, FREE] = Field(None, gt=0, le=1e6)
    """Most TFLOP/s of a process's device in the precision of the run, from its data sheet, such as 989 (H100 SXM, bf16,
    dense): the metrics then include `mfu`, model FLOPs utilisation."""
    trackers: Annotated[Trackers, FREE] = (TensorBoardConfig(),)
    """Programs that keep and draw the metrics, beside `metrics.jsonl`: names such as `tensorboard` and `wandb`, or
    mappings with settings, such as `{kind: wandb, project: mine}`."""

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


class BottleneckConfig(Config):
    """Steps in which the embedding sees continuous vectors before it sees codes; evaluations always use the codes.

        share(step) = 0                                  the first open_steps steps: the quantizer is bypassed
                      rises linearly                     the next close_steps steps
                      1                                  afterwards: the codes alone, bit for bit as without the setting

    The embedding sees ``continuous + share · (quantized - continuous)``. The share is a function of the step alone, so
    a checkpoint contains nothing of it. The quantizers run in every step: their losses and their updates are those of a
    run without the setting, so that codebooks follow the features before the embedding depends on them.
    """

    open_steps: Annotated[int, Field(ge=0)]
    """Steps at the beginning in which the embedding sees continuous vectors."""
    close_steps: Annotated[int, Field(ge=0)]
    """Steps after them in which it sees a mix of continuous and quantized vectors, with a linearly rising share of the
    latter; 0: the codes at once."""
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1)] = ("image", "text")
    """Tokenizers that begin with continuous vectors."""

    @property
    def steps(self) -> int:
        """Number of steps before the first one that sees codes alone."""
        return self.open_steps + self.close_steps

    def share(self, step: int) -> float:
        """Return the share of the quantized vectors in step number ``step`` (from 0), from 0 to 1."""
        return min(1.0, max(0.0, (step + 1 - self.open_steps) / (self.close_steps + 1)))

    @contextmanager
    def at(self, step: int, model: CLIP) -> Iterator[None]:
        """Mix the vectors of ``model`` in training mode as in step number ``step`` (from 0) within the block."""
        share = self.share(step)
        if share == 1:  # the modules of a run without the setting, and the same bits
            yield
            return
        tokenizers: list[Tokenizer] = [getattr(model, name) for name in self.modalities]
        try:
            for tokenizer in tokenizers:  # a tensor, so that a compiled model is compiled once for all shares
                tokenizer.code_share = torch.full((), share, device=tokenizer.device)
            yield
        finally:
            for tokenizer in tokenizers:
                tokenizer.code_share = None


class ScheduleConfig(ComputeConfig):
    """Length of the training, checkpoints, evaluations, and the computation of a step."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps of the run."""
    batch_size: int = Field(256, ge=2, le=2**24)
    """G, samples of one optimizer step over all ranks."""
    report_every: Annotated[int, FREE] = Field(20, ge=1)
    """Steps between two lines of metrics."""
    checkpoint_every: Annotated[int, FREE] = Field(500, ge=1)
    """Steps between two checkpoints; the last step is always one."""
    save_in_background: Annotated[bool, FREE] = True
    """Write checkpoints during the next steps, from a copy in host memory; false: the training waits."""
    keep_checkpoints: Annotated[int, FREE] = Field(2, ge=1)
    """Number of recent checkpoints to keep."""
    keep_every: Annotated[int | None, FREE] = Field(None, ge=1)
    """Also keep the checkpoints after every `keep_every` steps; a multiple of `checkpoint_every`."""
    keep_best: Annotated[str | None, FREE] = None
    """Also keep the checkpoint that is best by a metric of `evaluation`, named as in `metrics.jsonl`, such as
    `eval/unseen images/codes_only/top1`; `evaluate_every` must then be a multiple of `checkpoint_every`."""
    patience: Annotated[int | None, FREE] = Field(None, ge=1)
    """Evaluations in a row without a new best by `keep_best` after which the training ends; null: it has all `steps`.
    The schedule of the learning rate is that of all steps."""
    evaluate_every: Annotated[int | None, FREE] = Field(None, ge=1)
    """Steps between two evaluations during training; null: only at the end."""
    export: Annotated[Literal["last", "best"], FREE] = "last"
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
        if self.patience is not None and self.keep_best is None:
            raise ValueError(f"got patience {self.patience} and keep_best null; expected keep_best to name a figure")
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
    guards: Annotated[GuardConfig, FREE] = GuardConfig()
    """Settings of the checks of every step."""
    evaluation: Annotated[Evaluations, FREE] = ()
    """Evaluations at the end, and every `train.evaluate_every` steps."""
    report: Annotated[DetailsConfig | None, FREE] = DetailsConfig()
    """Files for people to look at, made at every evaluation; null: none."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are trained."""
        return torch.float64 if self.train.precision == "fp64" else torch.float32

    def fit(self) -> Self:
        """Return the configuration with the settings that follow from the number of samples. A collective."""
        return self

    def build_task(self, device: torch.device) -> Task:
        """Build the task with the weights of the first step, which are drawn from torch's generator. A collective."""
        raise NotImplementedError

    def feature_makers(self, task: Any) -> dict[str, FeatureMaker]:
        """Return a maker for each network whose outputs are stored before the first step, by name."""
        raise NotImplementedError

    def release_stored(self, task: Any) -> None:
        """Drop the networks whose outputs batches contain from now on."""

    def run_identity(self, task: Any, samples: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that define the trajectory; checkpoints with other ones are refused.

        Settings that only change the rounding (device, compilation, `loss.impl`) are not among them, nor are the
        guards, so that a run which they have stopped can resume. Neither are the numbers of processes and of
        microbatches.

        Args:
            task: with the weights of the first step.
            samples: fingerprint of the data.
        """
        settings = self.trajectory()
        settings["data"] |= samples
        return settings

    def has_codes(self) -> bool:
        """Return whether the image and the text tokenizer have codes."""
        return True

    def facts(self) -> RunFacts:
        """Return what trackers show of this run, with credentials masked."""
        return RunFacts(
            name=self.run.name,
            folder=self.run.path,
            config=mask_credentials(to_jsonable_python(self.model_dump())),
            text=to_yaml(self, mask_credentials),
        )

    @model_validator(mode="after")
    def _warmup_ends_and_best_is_a_figure(self) -> Self:
        Schedule(self.optim, self.train.steps)  # raises if they do not fit
        names = [f"{EVALUATION}{name}" for name in scalar_names(self.evaluation, codes=self.has_codes())]
        if self.train.keep_best not in (None, *names):
            expected = f"one of {', '.join(names)}" if names else "null, as evaluation is empty"
            raise ValueError(f"train.keep_best: got {self.train.keep_best!r}; expected {expected}")
        return self

    @model_validator(mode="after")
    def _optimizer_fits_shards(self) -> Self:
        kind, parallel = self.optim.kind, self.train.parallel
        if parallel != "ddp" and not ELEMENTWISE.fullmatch(kind):
            raise ValueError(
                f"train.parallel: got {parallel!r} with optim.kind {kind}, which steps a weight by numbers of all its "
                "rows, such as their norm; expected ddp, or optim.kind: adamw, muon or lion"
            )
        return self

    @model_validator(mode="after")
    def _nothing_held_out_is_trained_on(self) -> Self:
        trained = [(str(getattr(each, "path", None)), getattr(each, "split", None)) for each in self.data.sources]
        for number, task in enumerate(self.evaluation):
            share, data = getattr(task, "held_out", None), getattr(task, "data", None)
            same = (str(getattr(data, "path", None)), getattr(data, "split", None)) in trained
            if share is not None and same and (self.data.held_out or 0) < share:
                raise ValueError(
                    f"evaluation[{number}].held_out: got {share:g} of data that the run trains on, with data.held_out "
                    f"{self.data.held_out}; expected data.held_out to be at least as large"
                )
        return self
