"""Comparison of a tower's token features with a teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.model import CLIP, CLIPOutput
from vqclip.nn.precision import full_precision
from vqclip.quantizers import Stats
from vqclip.tokenizer import TokenizerOutput

PREFIX = "distillation"
"""Name of the sums of all terms among a tokenizer's statistics."""


class FeatureComparison(nn.Module):
    """Sum over tokens of 1 - cosine between two features.

    The cosine ignores the length of a feature, as the LayerNorm after a tower does. If the widths differ, the wider
    feature is first mapped to the narrower width by a fixed matrix with orthonormal rows. It is drawn by key and never
    trained: a run needs neither to save it nor to average its gradient.

    Args:
        student: width of the student's features.
        teacher: width of the teacher's.
        seed: key of the matrix.
    """

    map: Tensor | None

    def __init__(self, student: int, teacher: int, seed: int):
        super().__init__()
        self.student, self.teacher = student, teacher
        rows, columns = sorted((student, teacher))
        matrix = None
        if rows != columns:
            matrix = torch.empty(rows, columns, dtype=torch.float64)
            nn.init.orthogonal_(matrix, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("map", matrix, persistent=False)

    def forward(self, features: Tensor, target: Tensor, mask: Tensor | None) -> Stats:
        """Compare ``(B, N, D)`` with the teacher's ``(B, N, D')``, where ``mask`` ``(B, N)`` is True if given.

        Returns:
            This rank's ``sum``, differentiable, and ``count`` of tokens.
        """
        with full_precision(features.device):
            dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
            mine, theirs = features.to(dtype), target.detach().to(dtype)
            if self.map is not None:
                matrix = self.map.to(dtype)
                mine, theirs = (x @ matrix.T if x.shape[-1] > len(matrix) else x for x in (mine, theirs))
            apart = 1 - F.cosine_similarity(mine, theirs, dim=-1)
            if mask is not None:
                apart = apart.where(mask, 0)
            count = torch.full((), apart.numel(), device=apart.device) if mask is None else mask.sum()
            return Stats({"sum": apart.sum(), "count": count})


class ComparedCLIP(nn.Module):
    """CLIP whose forward also compares its towers' features with given ones.

    Args:
        model: the student.
        comparisons: name of a term → its comparison.
        modalities: name of a term → tower that it looks at.
    """

    def __init__(
        self,
        model: CLIP,
        comparisons: Mapping[str, FeatureComparison],
        modalities: Mapping[str, Modality],
    ):
        super().__init__()
        self.model = model
        self.comparisons = nn.ModuleDict(comparisons)
        self.modalities = dict(modalities)

    def forward(
        self,
        images: Tensor,
        tokens: Tensor,
        image_features: Tensor | None,
        text_features: Tensor | None,
        targets: Mapping[str, Tensor],
    ) -> CLIPOutput:
        """Run the training path; the statistics of a modality also contain the sums of its terms.

        Args:
            images: ``(B, 3, H, W)`` uint8.
            tokens: ``(B, N)`` int64.
            image_features: ``(B, N, D)`` of the image tower, if it was run before; see `CLIP.forward`.
            text_features: ``(B, N, D)`` of the text tower, if it was run before.
            targets: name of a term → features ``(B, N, D)`` of its teacher; terms without are left out.
        """
        wanted = {self.modalities[name] for name in targets}
        if "image" in wanted and image_features is None:
            image_features = self.model.image.tower_features(images)
        if "text" in wanted and text_features is None:
            text_features = self.model.text.tower_features(tokens)
        out = self.model(images, tokens, image_features, text_features)
        return out._replace(
            image=self._compare(out.image, "image", image_features, None, targets),
            text=self._compare(out.text, "text", text_features, self.model.text.mask(tokens), targets),
        )

    def _compare(
        self,
        out: TokenizerOutput,
        modality: str,
        features: Tensor | None,
        mask: Tensor | None,
        targets: Mapping[str, Tensor],
    ) -> TokenizerOutput:
        names = [name for name in targets if self.modalities[name] == modality]
        if not names or features is None:
            return out
        found = {name: self.comparisons[name](features, targets[name], mask) for name in names}
        sums = Stats.nest({PREFIX: Stats.nest(found)})
        return out._replace(stats=replace(out.stats, sums=out.stats.sums | sums.sums))


def separate_sums(stats: Mapping[str, Stats]) -> tuple[dict[str, Stats], Stats]:
    """Separate the quantizers' statistics, by modality, from the sums of distillation, ``<term>/sum`` and so on."""
    start = f"{PREFIX}/"
    own = {
        modality: replace(each, sums={name: total for name, total in each.sums.items() if not name.startswith(start)})
        for modality, each in stats.items()
    }
    sums = {name: total for each in stats.values() for name, total in each.under(PREFIX).sums.items()}
    return own, Stats(sums, is_global=True)
