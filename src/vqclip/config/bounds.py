"""How large a model may ask to be: far more than anybody trains, and less than a damaged number asks for."""

from __future__ import annotations

from typing import Annotated

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
