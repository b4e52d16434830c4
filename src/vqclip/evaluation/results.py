"""What an evaluation finds, in a form that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vqclip.data import mask_credentials
from vqclip.evaluation.codes import CodeUsage
from vqclip.evaluation.encode import MODES, Encoded, Mode
from vqclip.io.atomic import write_text


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of one task. Rates are in [0, 1]."""

    name: str
    """Name of the task."""
    kind: str
    """Kind of the task, such as `zero_shot`."""
    figures: dict[str, dict[str, float] | None]
    """Mode (`continuous`, `quantized`, `codes_only`) → figure (`top1`, `i2t_r5`, ...) → rate; None: see `notes`."""
    chance: dict[str, float]
    """Figure → its expectation for a model that knows nothing."""
    samples: int
    """Images."""
    classes: int | None
    """Classes, or None where there are none."""
    captions: int
    """Texts encoded: captions, or class prompts."""
    usage: dict[str, CodeUsage | None]
    """Modality (`image`, `text`) → use of its codebooks over this whole set; None where it has no codes."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks for the reader, such as why a mode is missing."""

    def scalars(self) -> dict[str, float]:
        """Every rate by a path such as ``pairs/codes_only/i2t_r1``, for a log of metrics."""
        return {
            f"{self.name}/{mode}/{figure}": rate
            for mode, figures in self.figures.items()
            for figure, rate in (figures or {}).items()
        }

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write results as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path, json.dumps(mask_credentials([result.to_json() for result in results]), indent=2, allow_nan=False) + "\n"
    )


def three_modes(image: Encoded, text: Encoded) -> tuple[list[Mode], list[str]]:
    """The modes that both modalities have, and a note for a missing one."""
    modes: list[Mode] = [mode for mode in MODES if mode in image.embeddings and mode in text.embeddings]
    lacking = [name for name, side in (("image", image), ("text", text)) if side.usage is None]
    if not lacking:
        return modes, []
    return modes, [f"no codes-only figures: the {' and the '.join(lacking)} quantizer has no codebook (Identity)"]


def all_modes(found: Mapping[Mode, dict[str, float]]) -> dict[str, dict[str, float] | None]:
    """Every mode, None where nothing was found."""
    return {mode: found.get(mode) for mode in MODES}
