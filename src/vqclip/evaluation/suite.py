"""Several evaluations of one model, by all ranks together or by one alone."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import nn

from vqclip import dist
from vqclip.evaluation.encode import Encoder, evaluating
from vqclip.evaluation.results import Result
from vqclip.evaluation.retrieval import RetrievalConfig
from vqclip.evaluation.share import Share
from vqclip.evaluation.zero_shot import ZeroShotConfig
from vqclip.model import CLIP
from vqclip.precision import Precision

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
    whole = dist.unwrap_ddp(model)
    share = Share.of_this_process(distributed)
    results = []
    with evaluating(whole), _folder(codes_folder) as folder:
        encoder = Encoder(share, precision, folder)
        for number, task in enumerate(tasks):
            logger.info("evaluating: %s", task.name)
            results.append(task.run(whole, encoder, str(number)))  # type: ignore[arg-type]
    return results


@contextlib.contextmanager
def _folder(path: str | Path | None) -> Iterator[Path]:
    if path is None:
        with tempfile.TemporaryDirectory(prefix="vqclip-codes-") as temporary:
            yield Path(temporary)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
