"""A warning when a codebook hardly serves any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from vqclip.config import Config
from vqclip.quantizers import Quantizer


class CollapseConfig(Config):
    """A codebook of which few codes are in use."""

    usage: float = Field(0.02, gt=0, le=1)
    """Share of the codes, of those that the tokens of a step could use, below which a codebook has collapsed."""
    steps: int = Field(500, ge=1)
    """For how long, before it is said."""

    def build(self) -> CollapseWatch:
        """Make the watch of a run."""
        return CollapseWatch(self)


class CollapseWatch:
    """Looks at the usage of codebooks wherever it is reported, and warns once for every collapse.

    Args:
        config: what counts as one.
    """

    def __init__(self, config: CollapseConfig):
        self._config = config
        self._since: dict[str, int] = {}
        self._told: set[str] = set()

    def look(self, done: int, name: str, quantizer: Quantizer, metrics: Mapping[str, float]) -> str | None:
        """What to warn of, if anything.

        Args:
            done: steps done.
            name: of the quantizer.
            quantizer: whose codebooks they are.
            metrics: its, with ``usage`` (mean share of the codes in use) and ``tokens`` of a step; without ``usage``
                where codes are not counted.
        """
        if "usage" not in metrics:
            return None
        tokens, sizes = metrics["tokens"], quantizer.codebook_sizes
        possible = sum(min(1.0, tokens / size) for size in sizes) / len(sizes)
        if metrics["usage"] >= self._config.usage * possible:
            self._since.pop(name, None)
            self._told.discard(name)
            return None
        since = self._since.setdefault(name, done)
        if done - since < self._config.steps or name in self._told:
            return None
        self._told.add(name)
        return (
            f"{name}: since step {since} or before, a step of {tokens:,.0f} tokens uses {metrics['usage']:.2%} of the "
            f"codes, where {possible:.0%} could be; the codebook has collapsed. What may help: model.{name}.normalize: "
            "layer before the quantizer, a lower optim.lr or a longer optim.warmup_steps; for vq dead_below > 0; for "
            "lfq and bsq a larger weight of codebook_entropy_gap or a higher entropy_temperature; several smaller "
            "codebooks (kind: product)"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        return {"since": dict(self._since), "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._since, self._told = dict(state["since"]), set(state["told"])
