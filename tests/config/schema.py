"""A small configuration tree with every kind of field that the tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from vqclip.config import Config


class Grid(Config):
    kind: Literal["grid"] = "grid"
    levels: tuple[Annotated[int, Field(ge=2)], ...] = Field((8, 5, 5, 5), min_length=1)


class Bits(Config):
    kind: Literal["bits"] = "bits"
    bits: int = Field(10, ge=1, le=62)


class Several(Config):
    kind: Literal["several"] = "several"
    layer: Layer
    codebooks: int = 2


Layer = Annotated[Grid | Bits | Several, Field(discriminator="kind")]
Several.model_rebuild()


class Optim(Config):
    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    name: Literal["adamw", "sgd"] = "adamw"
    fused: bool = False
    warmup: int | None = None

    @field_validator("warmup")
    @classmethod
    def _even(cls, value: int | None) -> int | None:
        if value is not None and value % 2:
            raise ValueError("expected an even number")
        return value

    @model_validator(mode="after")
    def _rising(self) -> Optim:
        if self.betas[0] > self.betas[1]:
            raise ValueError("betas must not fall")
        return self


class Tree(Config):
    optim: Optim = Optim(learning_rate=0.5, fused=True)
    layer: Layer = Grid(levels=(4, 3))
    needed: Layer | None = None
    path: Path | tuple[Path, ...] | None = None
    name: str = "run"
    weights: dict[str, float] = {}
    layers: tuple[Layer, ...] = ()


class Needed(Config):
    layer: Layer
