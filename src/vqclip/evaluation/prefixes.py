"""Evaluation of the prefixes of a tokenizer's ids: accuracy at every number of bits, from one pass of the towers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from vqclip import dist
from vqclip.evaluation.encode import MODES, Mode
from vqclip.evaluation.results import PrefixResult, Result
from vqclip.model import CLIP
from vqclip.quantizers import Prefix, Quantizer

TextPrefix = Literal["full", "same"]
"""Ids of a text beside a prefix of an image's ids. full: all of them. same: the same share, rounded up."""


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Prefixes of the ids of a model's images and texts, to `evaluate` beside all ids.

    A prefix has the first stages of residual quantizers and the first codebooks of product ones. Left-out ids are -1
    and add nothing to the vector, as in ``tokenizer.embed(tokenizer.truncate(ids, stages=2))``.

    Args:
        quantizers: those of the model, by modality.
        modes: modality → mode → prefix; the modes of all modalities are equal.
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

    def separate(self, result: Result) -> Result:
        """Move the figures and intervals of prefixes from `Result.figures` and `Details.intervals` to `prefixes`."""
        details = result.details
        intervals = {} if details is None else dict(details.intervals)
        prefixes = [
            PrefixResult(
                *prefix,
                bits_per_image=self._bits(result, "image", mode) or 0.0,
                bits_per_text=self._bits(result, "text", mode),
                figures=figures,
                intervals=intervals.pop(mode, {}),
            )
            for mode, prefix in self.modes["image"].items()
            if (figures := result.figures.get(mode)) is not None
        ]
        return dataclasses.replace(
            result,
            figures={mode: result.figures[mode] for mode in MODES},
            prefixes=prefixes,
            details=details and details.model_copy(update={"intervals": intervals}),
        )

    def _bits(self, result: Result, modality: str, mode: Mode) -> float | None:
        usage, quantizer = result.usage.get(modality), self.quantizers[modality]
        if usage is None:
            return None
        columns = quantizer.columns(*self.modes[modality][mode])
        return usage.tokens_per_sample * math.fsum(math.log2(quantizer.codebook_sizes[column]) for column in columns)
