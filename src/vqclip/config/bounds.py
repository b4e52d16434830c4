"""How large a model may ask to be: far more than anybody trains, and less than a damaged number asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

MAX_WIDTH = 2**16
"""Of features, channels and embeddings."""
MAX_LAYERS = 2**10
"""Of a transformer."""
MAX_CODEBOOKS = 2**16
"""Ids a token."""

EmbedDim = Annotated[int, Field(ge=2, le=MAX_WIDTH)]
"""E, width of the joint embedding."""
NumTokens = Annotated[int, Field(ge=1, le=2**20)]
"""N, tokens a sample."""


def fewest_within_tokens(config: Any) -> Any:
    """A validator for sections with ``num_tokens`` and ``fewest_tokens``; raises ValueError for more than N of these.

    Either may be None, in folders of format 2.
    """
    num, fewest = config.num_tokens, config.fewest_tokens
    if num is not None and fewest is not None and fewest > num:
        raise ValueError(f"got num_tokens {num} and fewest_tokens {fewest}; expected fewest_tokens <= num_tokens")
    return config
