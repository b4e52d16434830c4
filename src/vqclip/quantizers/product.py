"""Product quantization: the channels are split, and each part has a codebook of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from einops import rearrange
from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.stats import Stats

if TYPE_CHECKING:
    from vqclip.quantizers import QuantizerConfig


class Product(Quantizer):
    """Several codebooks a token (product quantization: Jégou et al. 2011; multi-codebook: UniTok, Ma et al. 2025).

    Vectors are split into ``codebooks`` runs of ``layer.dim`` neighbouring channels, each quantized as ``layer`` does;
    ids and vectors are put side by side. Codebook c has column c of the ids, and metrics of its own as ``c/usage``.
    Losses are means over the codebooks, with the weights of the layer.

    All codebooks are computed at once, in a group axis, for which the layer may hold no state.

    Args:
        layer: the quantizer of one part, itself a `Product` if need be.
        codebooks: number of parts, at least 1.

    Raises:
        ConfigError: ``codebooks`` is less than 1, or the layer has parameters or saved buffers, which the codebooks
            would have to share.
    """

    def __init__(self, layer: Quantizer, codebooks: int):
        if codebooks < 1:
            raise ConfigError(f"Product: codebooks is {codebooks}, expected at least 1")
        if state := list(layer.state_dict()):
            raise ConfigError(f"Product: the codebooks of {type(layer).__name__} would share its state {state}")
        super().__init__(layer.dim * codebooks, layer.codebook_sizes * codebooks, layer.loss_weights)
        self.layer = layer
        self.codebooks = codebooks

    def losses(self, stats: Stats) -> dict[str, Tensor]:
        """Those of the layer, each the mean over codebooks."""
        return self.layer.losses(stats)

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Those of the layer: means over codebooks, and of each as ``0/usage``, ``1/usage``, ..."""
        return self.layer.metrics(stats)

    def update(self, stats: Stats) -> None:
        """Nothing, for the layer has no state."""

    def decode(self, ids: Tensor) -> Tensor:
        """Decode every codebook's part; a part whose id is -1 is 0. See `Quantizer.decode`."""
        if not self.codebook_sizes:
            return self.layer.decode(ids)  # says that there is nothing to decode
        return super().decode(ids)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        vectors, ids = self.layer._quantize(self._split(x))
        return self._join(vectors), self._join(ids)

    def _decode(self, ids: Tensor) -> Tensor:
        return self._join(self.layer._decode(self._split(ids)))

    def _continuous(self, x: Tensor) -> Tensor:
        return self._join(self.layer._continuous(self._split(x)))

    def _statistics(self, x: Tensor, vectors: Tensor, ids: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
        return self.layer._statistics(self._split(x), self._split(vectors), self._split(ids), keep)

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
    codebooks: Annotated[int, Field(ge=1)]
    """Number of codebooks, and so of ids per token."""

    def build(self) -> Product:
        """Make the quantizer."""
        return Product(self.layer.build(), self.codebooks)
