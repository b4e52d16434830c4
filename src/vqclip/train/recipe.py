"""Settings of small heads on frozen towers that follow from the number of samples: ``recipe: heads``.

The rule was measured on parts of three data sets, 250 to 3,120 samples; see docs/pretrained.md.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

__all__ = ["head_settings", "overrides_of_unset"]


def head_settings(samples: int) -> dict[str, Any]:
    """Return the settings for a number of samples, by key path.

    Args:
        samples: of an epoch, at least 2.
    """
    batch = max(2, min(512, 2 ** (samples // 2).bit_length() // 2))  # a power of 2, at most half of the samples
    epochs = 80 * min(1.0, (3000 / samples) ** 0.5)
    steps = max(20, round(epochs * samples / batch))
    settings: dict[str, Any] = {
        "train.batch_size": batch,
        "train.steps": steps,
        "train.checkpoint_every": steps,
        "optim.warmup_steps": min(30, steps // 10),
        "data.views": max(1, min(8, 40_000 // samples)),
    }
    for modality in ("image", "text"):
        settings[f"model.{modality}.project_in.dropout"] = 0.3
        settings[f"model.{modality}.project_in.input_dropout"] = 0.1
    return settings


def overrides_of_unset(config: BaseModel, settings: dict[str, Any]) -> list[str]:
    """Return the settings whose keys exist in a configuration and were not set, as overrides of it."""
    return [f"{path}={json.dumps(value)}" for path, value in settings.items() if _is_unset(config, path.split("."))]


def _is_unset(section: Any, path: list[str]) -> bool:
    name, *rest = path
    if name not in type(section).model_fields:
        return False  # such as the dropout of a projection of one layer
    if not rest:
        return name not in section.model_fields_set
    return _is_unset(getattr(section, name), rest)
