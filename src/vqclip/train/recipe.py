"""Settings of small heads on frozen towers that follow from the number of samples: ``recipe: heads``.

Measured on three data sets of 2,500 to 3,120 samples and on a half, a quarter and a tenth of each (docs/log.md, "Wider
heads"). Beyond 3,120 samples it is a guess.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def head_settings(samples: int, batch: int | None = None) -> dict[str, Any]:
    """Return the settings for a number of samples, by key path.

    Args:
        samples: of an epoch.
        batch: `train.batch_size` where it is set; None: it follows too.
    """
    if batch is None:
        batch = max(2, min(512, 2 ** (samples // 2).bit_length() // 2))  # a power of 2, at most half of the samples
    epochs = min(300.0, 120 * (3000 / samples) ** 0.5)
    settings: dict[str, Any] = {
        "train.batch_size": batch,
        "train.steps": max(60, round(epochs * samples / batch)),
        "data.views": max(1, min(8, 40_000 // samples)),
    }
    for modality in ("image", "text"):
        settings[f"model.{modality}.project_in.dropout"] = 0.5
        settings[f"model.{modality}.project_in.input_dropout"] = 0.1
    return settings


def is_set(config: BaseModel, path: str) -> bool | None:
    """Return whether the key at a path was set; None if there is no such key, as the dropout of a linear projection."""
    name, _, rest = path.partition(".")
    if name not in type(config).model_fields:
        return None
    return is_set(getattr(config, name), rest) if rest else name in config.model_fields_set
