"""Signs of a run that no longer learns or of codebooks that have collapsed, in the metrics of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

USAGE = 0.005
"""Perplexity below which a codebook counts as collapsed, as a fraction of the codes that evenly used codes would show
(the default)."""
ONE_CODE = 1.05
"""Perplexity below which a codebook counts as using a single code."""
EQUAL = 1e-5
"""Distance of the mean cosine from 1 below which embeddings count as equal."""
AT_CHANCE = 1e-3
"""Relative distance from the loss at chance below which a loss counts as such."""

RESTART = (
    "Such weights rarely recover: start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or "
    "resume from an earlier checkpoint"
)
"""Advice for a run that no longer learns."""


def find_signs(figures: Mapping[str, float], loss: float, chance: float) -> dict[str, str]:
    """Return the signs of a model that no longer learns, by name, in words.

    Args:
        figures: metrics of a step: ``grad_norm``, and ``<modality>/embedding_cosine`` of a task that embeds.
        loss: the contrastive loss; NaN while the learning rate warms up, when it may stay at chance.
        chance: loss of a model that knows nothing.
    """
    signs = {}
    if figures["grad_norm"] < 1e-12:
        signs["gradient"] = "the gradient is 0, so the model no longer learns"
    for modality in ("image", "text"):
        if figures.get(f"{modality}/embedding_cosine", 0.0) > 1 - EQUAL:
            signs[f"{modality} embeddings"] = f"all {modality} embeddings of a batch are equal"
    if abs(loss - chance) <= AT_CHANCE * chance:
        signs["loss"] = f"the loss is {loss:.4f}, that of a model that knows nothing ({chance:.4f})"
    return signs


def has_collapsed(codebook: Mapping[str, Any], usage: float = USAGE) -> bool:
    """Return whether a codebook of `read_codebooks` uses too few of its codes.

    Perplexity decides, not the number of codes seen, which a few stray tokens in a long window keep above any limit.
    """
    possible, size = codebook["usage_if_uniform"], codebook["codes"]
    if possible * size < min(10, 0.9 * size):  # too few tokens
        return False
    return bool(codebook["perplexity"] < max(ONE_CODE, usage * possible * size))


def read_codebooks(modality: str, figures: Mapping[str, float], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the usage of each codebook of a modality, named as in the metrics: ``image/3``, ``image/0/3``."""
    usages = [name.removesuffix("usage") for name in figures if name.startswith(f"{modality}/")]
    usages = [name for name in usages if name.endswith("/") and f"{name}usage" in figures]
    found = []
    for name in usages:
        if any(other != name and other.startswith(name) for other in usages):
            continue  # the mean of those
        above = name
        while f"{above}usage_if_uniform" not in figures:
            above = f"{above.rstrip('/').rpartition('/')[0]}/"
        values = {each: figures[f"{name}{each}"] for each in ("usage", "perplexity")}
        possible = figures[f"{above}usage_if_uniform"]
        tokens = figures[f"{modality}/tokens"]
        codes = {"codes": sizes[0], "tokens": tokens, "usage_if_uniform": possible}  # all parts are of one layer
        found.append({"name": name.rstrip("/"), **codes, **values})
    return found


def suggest_remedies(modality: str) -> str:
    """Return what may help when codebooks of a modality have collapsed."""
    return (
        f"What may help: model.{modality}.normalize: layer before the quantizer, a lower optim.lr or a longer "
        "optim.warmup_steps; for vq dead_below > 0; for lfq and bsq a larger weight of codebook_entropy_gap or a "
        "higher entropy_temperature; several smaller codebooks (kind: product)"
    )
