"""Quantizers: vectors to discrete codes and back, with one contract (`Quantizer` in base.py).

After the towers, whose projected features they quantize; before the tokenizer, which contains them. To add one: a file
with its module and its config class, a line in `QuantizerConfig`, a line in the list of
tests/quantizers/test_contract.py.
"""

from typing import Annotated

from pydantic import Field

from vqclip.quantizers.base import Quantizer, QuantizerOutput
from vqclip.quantizers.binary import BSQ, LFQ, BinaryLossWeights, BSQConfig, LFQConfig
from vqclip.quantizers.fsq import FSQ, FSQConfig, Identity, IdentityConfig
from vqclip.quantizers.nearest import SimVQ, SimVQConfig
from vqclip.quantizers.nested import Product, ProductConfig, Residual, ResidualConfig
from vqclip.quantizers.other_programs import codebook_matrix, from_vector_quantize_pytorch
from vqclip.quantizers.stats import Order, Stats, sync
from vqclip.quantizers.vectors import Prefix
from vqclip.quantizers.vq import VQ, VQConfig, VQLossWeights

QuantizerConfig = Annotated[
    FSQConfig | LFQConfig | BSQConfig | VQConfig | SimVQConfig | IdentityConfig | ResidualConfig | ProductConfig,
    Field(discriminator="kind"),
]
"""Configuration of any quantizer, chosen by ``kind``; ``.build()`` makes the module."""

for _nesting in (ResidualConfig, ProductConfig):
    _nesting.model_rebuild(_types_namespace={"QuantizerConfig": QuantizerConfig})

__all__ = [
    "BSQ",
    "FSQ",
    "LFQ",
    "VQ",
    "BSQConfig",
    "BinaryLossWeights",
    "FSQConfig",
    "Identity",
    "IdentityConfig",
    "LFQConfig",
    "Order",
    "Prefix",
    "Product",
    "ProductConfig",
    "Quantizer",
    "QuantizerConfig",
    "QuantizerOutput",
    "Residual",
    "ResidualConfig",
    "SimVQ",
    "SimVQConfig",
    "Stats",
    "VQConfig",
    "VQLossWeights",
    "codebook_matrix",
    "from_vector_quantize_pytorch",
    "sync",
]
