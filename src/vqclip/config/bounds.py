"""Size limits for models: large enough for any real model, small enough to reject a corrupt configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_WIDTH = 2**16
"""Most features or channels."""
MAX_LAYERS = 2**10
"""Most layers of a transformer."""
MAX_CODEBOOKS = 2**16
"""Most codebooks, and so ids, of a token."""
MAX_STAGES = 2**8
"""Most residual stages, each a module of its own."""

EmbedDim = Annotated[int, Field(ge=2, le=MAX_WIDTH)]
"""E, width of the joint embedding."""
NumTokens = Annotated[int, Field(ge=1, le=2**20)]
"""N, tokens of a sample."""
