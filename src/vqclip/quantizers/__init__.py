"""Quantizers: vectors to discrete codes and back, by one contract (`Quantizer`).

To add one: a file with its config class beside its module class, a line in `QuantizerConfig`, a line in the list of
tests/quantizers/test_contract.py.
"""

from typing import Annotated

from pydantic import Field

from vqclip.quantizers.base import Quantizer, QuantizerOutput
from vqclip.quantizers.fsq import FSQ, FSQConfig
from vqclip.quantizers.identity import Identity, IdentityConfig
from vqclip.quantizers.lfq import LFQ, LFQConfig, LFQLossWeights
from vqclip.quantizers.product import Product, ProductConfig
from vqclip.quantizers.stats import Stats, sync

QuantizerConfig = Annotated[FSQConfig | LFQConfig | IdentityConfig | ProductConfig, Field(discriminator="kind")]
"""Any quantizer's configuration, chosen by ``kind``; ``.build()`` makes the module."""

ProductConfig.model_rebuild(_types_namespace={"QuantizerConfig": QuantizerConfig})

__all__ = [
    "FSQ",
    "LFQ",
    "FSQConfig",
    "Identity",
    "IdentityConfig",
    "LFQConfig",
    "LFQLossWeights",
    "Product",
    "ProductConfig",
    "Quantizer",
    "QuantizerConfig",
    "QuantizerOutput",
    "Stats",
    "sync",
]
