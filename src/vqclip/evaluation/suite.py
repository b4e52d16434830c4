"""Evaluation of one model on several tasks, by all ranks together or by one alone.

With `Prefixes`, also of the prefixes of its ids: accuracy at every number of bits, from one pass of the towers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from torch import nn

from vqclip import dist
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import DistributedError, VqclipError, name_section
from vqclip.evaluation.details import DetailsConfig
from vqclip.evaluation.encode import MODES, Encoder, Mode, RankPartition
from vqclip.evaluation.pixels import PixelQualityConfig
from vqclip.evaluation.probes import KnnConfig, LinearProbeConfig
from vqclip.evaluation.results import Result
from vqclip.evaluation.retrieval import RetrievalConfig
from vqclip.evaluation.zero_shot import ZeroShotConfig
from vqclip.model import CLIP
from vqclip.nn.precision import Precision, evaluation_mode
from vqclip.quantizers import Prefix, Quantizer

logger = logging.getLogger(__name__)

EvaluationConfig = Annotated[
    ZeroShotConfig | RetrievalConfig | LinearProbeConfig | KnnConfig | PixelQualityConfig,
    Field(discriminator="kind"),
]
"""Any kind of task."""


def _distinct(tasks: tuple[EvaluationConfig, ...]) -> tuple[EvaluationConfig, ...]:
    names = [(task.kind, task.name) for task in tasks]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise ValueError(f"got two of kind {kind!r} named {name!r}; give each another name")
    return tasks


Evaluations = Annotated[tuple[EvaluationConfig, ...], AfterValidator(_distinct)]
"""Several tasks with distinct names."""


def scalar_names(tasks: Sequence[EvaluationConfig], *, codes: bool = True) -> list[str]:
    """Return the keys of `Result.scalars` of all tasks; without the codes-only figures if ``codes`` is False."""
    modes = MODES if codes else MODES[:2]
    return [
        f"{task.name}/{mode}/{figure}"
        for task in tasks
        for mode in modes
        for figure in (*task.figures, *(task.codes_figures if mode == MODES[2] else ()))
    ]


def prepare(tasks: Sequence[EvaluationConfig], model: nn.Module | None = None) -> None:
    """Open the data of every task on all ranks; draw and index data that is not prepared yet.

    Training calls this first, so that a wrong path is reported before the work and not after it.

    Args:
        tasks: as for `evaluate`.
        model: model that will be evaluated, if there is one already.

    Raises:
        ConfigError: the model has no part that a task needs, such as a pixel decoder.
        DataError: the data cannot be used.
    """
    partition = RankPartition.create(True)
    for number, task in enumerate(tasks):
        with name_section(f"evaluation[{number}]"):
            if model is not None:
                task.require(model)
            task.open(partition)


TextPrefix = Literal["full", "same"]
"""Ids of a text beside a prefix of an image's ids. full: all of them. same: the same share, rounded up."""


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Prefixes of the ids of a model's images and texts, to `evaluate` beside all ids.

    A prefix has the first stages of residual quantizers and the first codebooks of product ones. Left-out ids are -1
    and add nothing to the vector, as in ``tokenizer.embed(tokenizer.truncate(ids, stages=2))``.

    Args:
        quantizers: those of the model, by modality.
        modes: modality → mode in `Result.figures` → prefix; the modes of all modalities are equal.
    """

    quantizers: Mapping[str, Quantizer]
    modes: Mapping[str, Mapping[Mode, Prefix]]

    @classmethod
    def of(
        cls, whole: CLIP | nn.Module, prefixes: Sequence[Prefix] | None = None, text: TextPrefix = "full"
    ) -> Prefixes:
        """Choose prefixes of a model.

        Args:
            whole: as `model` of `evaluate`.
            prefixes: prefixes of the image tokenizer's ids; None: those of `Prefix.shorter`.
            text: see `TextPrefix`.

        Raises:
            ConfigError: the image tokenizer has no such prefix.
        """
        model: Any = dist.unwrap_ddp(whole)
        image, of_text = (each.quantizer.extent for each in (model.image, model.text))
        found = image.shorter() if prefixes is None else list(prefixes)
        for each in found:
            model.image.quantizer.columns(*each)
        modes = {
            "image": {str(each): each for each in found},
            "text": {str(each): of_text if text == "full" else each.share(image, of_text) for each in found},
        }
        return cls(model.quantizers(), modes)

    def bits(self, result: Result, modality: str, mode: Mode) -> float | None:
        """Return the mean size of the ids of an image or a text in a mode of `modes`; None without codes."""
        usage, quantizer = result.usage.get(modality), self.quantizers[modality]
        if usage is None:
            return None
        columns = quantizer.columns(*self.modes[modality][mode])
        return usage.tokens_per_sample * math.fsum(math.log2(quantizer.codebook_sizes[column]) for column in columns)


@dataclasses.dataclass(frozen=True)
class EvaluationOutcome:
    """Results of several tasks, and the failure if there was one."""

    results: list[Result]
    """Results of the tasks that succeeded."""
    failure: VqclipError | None
    """Error that names the tasks that failed, of the kind of the first; None if none failed."""


def evaluate(
    model: CLIP | nn.Module,
    tasks: Sequence[EvaluationConfig],
    *,
    precision: Precision = "fp32",
    distributed: bool = True,
    codes_folder: str | Path | None = None,
    details: DetailsConfig | None = None,
    prefixes: Prefixes | None = None,
) -> list[Result]:
    """Evaluate a model in three modes: continuous, quantized, codes only.

    Every image and text of a task passes its tower once; tasks in a row share the images of equal labelled data, and
    the first of them writes the ids. Evaluation mode and ``no_grad`` are set inside, and the mode of each part is
    restored. No global random generator is used. The figures do not depend on the number of ranks or on the batch size,
    up to rounding.

    Args:
        model: a `CLIP`, for tasks without texts also an `ImageModel`; or one wrapped by `vqclip.dist.wrap_ddp`.
        tasks: data and settings of each evaluation.
        precision: ``"bf16"`` or ``"fp16"`` for autocast; ``"fp32"`` and ``"fp64"`` compute in the weights' own type, in
            which codes-only equals quantized bit for bit.
        distributed: True: all ranks must call this; they share the work, all get the results, and an error on one is
            raised on all. False: this process does all the work and enters no collective.
        codes_folder: folder for the ids, in files ``<number of the task>-image-<rank>.safetensors`` and the like;
            None: a temporary folder.
        details: amounts of the `Result.details` to make, on rank 0; None: none.
        prefixes: prefixes of the ids, which are then further modes of `Result.figures`.

    Returns:
        One `Result` for each task.

    Raises:
        DataError: the data cannot be used; the message names file and sample.
        NonFiniteError: an embedding is NaN or infinite.
    """
    outcome = try_all(model, tasks, precision, distributed, codes_folder, details, prefixes)
    if outcome.failure is not None:
        raise outcome.failure
    return outcome.results


def try_all(
    model: CLIP | nn.Module,
    tasks: Sequence[EvaluationConfig],
    precision: Precision = "fp32",
    distributed: bool = True,
    codes_folder: str | Path | None = None,
    details: DetailsConfig | None = None,
    prefixes: Prefixes | None = None,
) -> EvaluationOutcome:
    """Run `evaluate`, but continue after a task that fails: its error is returned with the results of the others.

    Errors other than `VqclipError` are raised at once.
    """
    whole = dist.unwrap_ddp(model)
    partition = RankPartition.create(distributed)
    results, failures = list[Result](), list[tuple[str, VqclipError]]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(whole))
        if codes_folder is None:
            codes_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vqclip-codes-"))
        Path(codes_folder).mkdir(parents=True, exist_ok=True)
        modes = {} if prefixes is None else prefixes.modes
        encoder = Encoder(partition, precision, Path(codes_folder), details=details, prefixes=modes)
        for number, task in enumerate(tasks):
            logger.info("evaluating: %s", task.name)
            try:
                task.require_texts(whole)
                with explain_worker_deaths("evaluation") if task.workers else contextlib.nullcontext():
                    result = task.run(whole, encoder, str(number))  # type: ignore[arg-type]
                results.append(result)
            except DistributedError:  # a rank is lost, or failed with an error of another kind
                raise
            except VqclipError as error:
                failures.append((task.name, error))
    if not failures:
        return EvaluationOutcome(results, None)
    first = failures[0][1]
    joined = type(first)("\n".join(f"evaluation {name!r}: {error}" for name, error in failures))
    joined.__cause__ = first
    return EvaluationOutcome(results, joined)
