"""Options of `vqclip tokenize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.data import SourceConfigBase
from vqclip.data.decode import MAX_PIXELS
from vqclip.nn.precision import Precision

__all__ = ["Options"]


class Options(Config):
    """Options of `vqclip tokenize`."""

    tokenizer: str
    """Tokenizer folder, or hub name."""
    data: SourceConfigBase
    """The data set."""
    out: Path
    """Folder of the token shards."""
    modality: Literal["image", "text", "both"] = "both"
    """Data to tokenize."""
    batch_size: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Samples in a batch; the last batch of a shard is padded."""
    workers: Annotated[int, Field(ge=0, le=512)] = 0
    """Worker processes that decode images, for each process of the job."""
    precision: Precision = "fp32"
    """fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times slower,
    but batch size, threads and machine change ids about half a billion times less often."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process on the CPU; more processes are faster than more threads."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of samples that may be unusable; they are left out."""
    max_pixels: int = MAX_PIXELS
    """Larger images are unusable."""
    timeout_s: float = 240.0
    """Longest wait for a worker."""
