"""Several evaluations of one model, by all ranks together or by one alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import nn

from vqclip import dist
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import VqclipError
from vqclip.evaluation.encode import MODES, Encoder, evaluating
from vqclip.evaluation.results import Result
from vqclip.evaluation.retrieval import RetrievalConfig
from vqclip.evaluation.share import Share
from vqclip.evaluation.zero_shot import ZeroShotConfig
from vqclip.model import CLIP
from vqclip.nn.precision import Precision

logger = logging.getLogger(__name__)

EvaluationConfig = Annotated[ZeroShotConfig | RetrievalConfig, Field(discriminator="kind")]
"""Any kind of evaluation."""


def _distinct(tasks: tuple[EvaluationConfig, ...]) -> tuple[EvaluationConfig, ...]:
    names = [(task.kind, task.name) for task in tasks]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise ValueError(f"got two of kind {kind!r} named {name!r}; give each a name of its own")
    return tasks


Evaluations = Annotated[tuple[EvaluationConfig, ...], AfterValidator(_distinct)]
"""Several evaluations, told apart by their names."""


def scalar_names(tasks: Sequence[EvaluationConfig], *, codes: bool = True) -> list[str]:
    """The keys of `Result.scalars` of all tasks, without those of codes where ``codes`` is False."""
    modes = MODES if codes else MODES[:2]
    return [f"{task.name}/{mode}/{figure}" for task in tasks for mode in modes for figure in task.figures]


def prepare(tasks: Sequence[EvaluationConfig], *, distributed: bool = True) -> None:
    """Open the data of every task, drawing and indexing what is not there yet; `evaluate` then finds it.

    Called before training, it finds a wrong path then, and not when all the work is done.

    Args:
        tasks: as for `evaluate`.
        distributed: as for `evaluate`.

    Raises:
        DataError: data that cannot be used.
    """
    share = Share.of_this_process(distributed)
    for task in tasks:
        share.open(task.data)


@dataclasses.dataclass(frozen=True)
class EvaluationOutcome:
    """What came of several evaluations."""

    results: list[Result]
    """Those that succeeded."""
    failure: VqclipError | None
    """Names those that failed; of the kind of the first."""


def evaluate(
    model: CLIP | nn.Module,
    tasks: Sequence[EvaluationConfig],
    *,
    precision: Precision = "fp32",
    distributed: bool = True,
    codes_folder: str | Path | None = None,
) -> list[Result]:
    """Evaluate a model in three modes: continuous, quantized, codes only.

    Every image and text passes its tower once. Evaluation mode and ``no_grad`` are set within, and each part of the
    model is left in the mode it was in; no global random generator is touched. The figures do not depend on the number
    of ranks or on the batch size, up to rounding.

    Args:
        model: a `CLIP`, or one wrapped by `vqclip.dist.wrap_ddp`.
        tasks: what to evaluate.
        precision: ``"bf16"`` or ``"fp16"`` for autocast; ``"fp32"`` and ``"fp64"`` compute in the weights' own type, in
            which codes-only equals quantized bit for bit.
        distributed: True: all ranks share the work, must all call this, and all get the results; an error on one is
            raised on all. False: this process does everything alone, and no collective is entered.
        codes_folder: keep the ids in this folder, as ``<number of the task>-image-<rank>.safetensors`` and the like;
            None: a temporary one.

    Returns:
        One `Result` for each task.

    Raises:
        DataError: data that cannot be used; the message names file and sample.
        NonFiniteError: the model gives NaN or infinite embeddings.
    """
    outcome = try_all(model, tasks, precision=precision, distributed=distributed, codes_folder=codes_folder)
    if outcome.failure is not None:
        raise outcome.failure
    return outcome.results


def try_all(
    model: CLIP | nn.Module,
    tasks: Sequence[EvaluationConfig],
    *,
    precision: Precision = "fp32",
    distributed: bool = True,
    codes_folder: str | Path | None = None,
) -> EvaluationOutcome:
    """`evaluate`, in which a task that fails takes nothing from the others: its error is returned beside their results.

    An error that is no `VqclipError` is raised at once.
    """
    whole = dist.unwrap_ddp(model)
    share = Share.of_this_process(distributed)
    results, failures = [], []
    with evaluating(whole), _folder(codes_folder) as folder:
        encoder = Encoder(share, precision, folder)
        for number, task in enumerate(tasks):
            logger.info("evaluating: %s", task.name)
            try:
                with explain_worker_deaths("evaluation") if task.workers else contextlib.nullcontext():
                    results.append(task.run(whole, encoder, str(number)))  # type: ignore[arg-type]
            except VqclipError as error:
                share.require_all_here(error)
                failures.append((task.name, error))
    return EvaluationOutcome(results, _joined(failures))


def _joined(failures: Sequence[tuple[str, VqclipError]]) -> VqclipError | None:
    """One error that tells of all, caused by the first."""
    if not failures:
        return None
    _, first = failures[0]
    joined = type(first)("\n".join(f"evaluation {name!r}: {error}" for name, error in failures))
    joined.__cause__ = first
    return joined


@contextlib.contextmanager
def _folder(path: str | Path | None) -> Iterator[Path]:
    if path is None:
        with tempfile.TemporaryDirectory(prefix="vqclip-codes-") as temporary:
            yield Path(temporary)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
