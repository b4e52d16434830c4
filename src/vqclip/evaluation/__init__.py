"""Evaluations of a model, each in three modes. After the model; before training and the commands.

- *continuous*: the quantizers of both towers bypassed.
- *quantized*: the training path, in evaluation mode.
- *codes only*: ids written to a file, reloaded and embedded. Equal to *quantized* bit for bit in fp32.
"""

from vqclip.evaluation.details import Details, DetailsConfig
from vqclip.evaluation.encode import MODES, CodeUsage, load_ids, save_ids
from vqclip.evaluation.images import CaptionedData, LabelledData
from vqclip.evaluation.pixels import PixelQualityConfig
from vqclip.evaluation.probes import KnnConfig, LinearProbeConfig
from vqclip.evaluation.results import (
    Result,
    StoredEvaluation,
    format_figure,
    format_line,
    format_results,
    main_figures,
    read_evaluation,
    stored_files,
    write_csv,
    write_evaluations,
    write_json,
)
from vqclip.evaluation.retrieval import RetrievalConfig
from vqclip.evaluation.suite import (
    EvaluationConfig,
    EvaluationOutcome,
    Evaluations,
    Prefixes,
    evaluate,
    prepare,
    scalar_names,
    try_all,
)
from vqclip.evaluation.zero_shot import ZeroShotConfig

__all__ = [
    "MODES",
    "CaptionedData",
    "CodeUsage",
    "Details",
    "DetailsConfig",
    "EvaluationConfig",
    "EvaluationOutcome",
    "Evaluations",
    "KnnConfig",
    "LabelledData",
    "LinearProbeConfig",
    "PixelQualityConfig",
    "Prefixes",
    "Result",
    "RetrievalConfig",
    "StoredEvaluation",
    "ZeroShotConfig",
    "evaluate",
    "format_figure",
    "format_line",
    "format_results",
    "load_ids",
    "main_figures",
    "prepare",
    "read_evaluation",
    "save_ids",
    "scalar_names",
    "stored_files",
    "try_all",
    "write_csv",
    "write_evaluations",
    "write_json",
]
