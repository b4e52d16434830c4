"""Product quantization: the channels are split into parts, each with its own codebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from einops import rearrange
from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.checks import check_size
from vqclip.quantizers.stats import Stats

if TYPE_CHECKING:  # the package binds the name to its union, which contains `ProductConfig`
    from vqclip.quantizers.base import QuantizerSection as QuantizerConfig


class Product(Quantizer):
    """Several codebooks per token (product quantization: Jégou et al. 2011; multi-codebook: UniTok, Ma et al. 2025).

    Vectors are split into ``codebooks`` parts of ``layer.dim`` neighbouring channels. Each part is quantized by
    ``layer``; ids and vectors are concatenated. Codebook c has column c of the ids and metrics ``c/usage``. Losses are
    means over the codebooks, with the weights of the layer.

    All parts are computed together, in the group axis; a layer with state has a separate codebook for each.

    Args:
        layer: the quantizer of one part, which may be a `Product` or `Residual`; only its settings are used.
        codebooks: number of parts, at least 1.
        groups: G, the number of such products; more than 1 inside another `Product`.

    Raises:
        ConfigError: ``codebooks`` is less than 1, or there are more codebooks or channels than `check_size` allows.
    """

    def __init__(self, layer: Quantizer, codebooks: int, groups: int = 1):
        if codebooks < 1:
            raise ConfigError(f"Product: codebooks is {codebooks}, expected at least 1")
        check_size("Product", layer.dim * codebooks, len(layer.codebook_sizes) * codebooks)
        super().__init__(layer.dim * codebooks, layer.codebook_sizes * codebooks, layer.loss_weights)
        self.layer = layer.spawn(groups * codebooks)
        self.codebooks = codebooks

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return the layer's losses, each the mean over codebooks."""
        return self.layer._losses(stats)

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Return the layer's metrics: means over codebooks, and ``0/usage``, ``1/usage``, ... for each."""
        return self.layer.metrics(stats)

    def _update(self, stats: Stats, start: bool) -> None:
        """Update the layer; see `Quantizer.update`."""
        self.layer.update(stats, start)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """See `Quantizer.places`."""
        inner, places = self.layer.extent.codebooks, self.layer.places
        return tuple((stage, part * inner + codebook) for part in range(self.codebooks) for stage, codebook in places)

    @property
    def started(self) -> bool:
        """True if the layer is initialised."""
        return self.layer.started

    def decode(self, ids: Tensor) -> Tensor:
        """Decode all parts; a part with id -1 is 0. See `Quantizer.decode`."""
        if not self.codebook_sizes:
            return self.layer.decode(ids)  # raises the layer's error
        return super().decode(ids)

    @property
    def refinement(self) -> Tensor | float | None:
        """The layer's refinement, repeated for every part."""
        ratio = self.layer.refinement
        return ratio.repeat(self.codebooks) if isinstance(ratio, Tensor) else ratio

    def spawn(self, groups: int = 1) -> Product:
        """See `Quantizer.spawn`."""
        return Product(self.layer, self.codebooks, groups)

    def _bound(self, x: Tensor) -> Tensor:
        return self._join(self.layer._bound(self._split(x)))

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        return self._join(self.layer._pass_gradient(self._split(values), self._split(bounded)))

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.layer._nearest(self._split(bounded))
        return self._join(values), self._join(ids)

    def _decode(self, ids: Tensor) -> Tensor:
        return self._join(self.layer._decode(self._split(ids)))

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        values, ids, stats = self.layer._quantize(self._split(bounded), keep)
        return self._join(values), self._join(ids), stats

    def _split(self, x: Tensor) -> Tensor:
        """``(T, G, C D)`` → ``(T, G C, D)``."""
        return rearrange(x, "t g (c d) -> t (g c) d", c=self.codebooks)

    def _join(self, x: Tensor) -> Tensor:
        """``(T, G C, D)`` → ``(T, G, C D)``."""
        return rearrange(x, "t (g c) d -> t g (c d)", c=self.codebooks)


class ProductConfig(Config):
    """Product quantization: several codebooks of the same kind side by side."""

    kind: Literal["product"] = "product"
    layer: QuantizerConfig
    """The quantizer of each codebook; its width times ``codebooks`` is the whole width."""
    codebooks: Annotated[int, Field(ge=1, le=MAX_CODEBOOKS)]
    """Number of codebooks, and so of ids per token."""

    def build(self) -> Product:
        """Make the quantizer."""
        return Product(self.layer.build(), self.codebooks)
