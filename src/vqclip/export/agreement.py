"""Compare an exported tokenizer with the original.

Another runtime, or another batch size, adds numbers in another order, so features differ in their last bits. A feature
that close to the border between two codes gets the other code. `Agreement.between_batches` counts how often that
happens between two batch sizes of the tokenizer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vqclip.errors import CheckpointError, DataError, NonFiniteError
from vqclip.export.program import AnyTokenizer, Part, export_program, parts_of
from vqclip.export.runtime import OnnxTokenizer
from vqclip.export.to_onnx import INFO_FILE
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.stored import fingerprint, pixels_fingerprint

__all__ = ["Agreement", "verify", "verify_program"]

Method = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Comparison of two ways of running one tokenizer on the same inputs."""

    samples: int
    """Inputs compared."""
    ids: int
    """Ids of the tokenizer, without padding."""
    differing_ids: int
    """Ids for which the other way returns another value."""
    differing_samples: int
    """Samples with such an id."""
    between_batches: int
    """Ids that change in the tokenizer itself when every batch is split into two halves."""
    vectors: float
    """Largest absolute difference of `decode`, from equal ids."""
    embeddings: float
    """Largest absolute difference of `embed`, from equal ids."""
    pixels: float | None = None
    """Largest absolute difference of `decode_pixels`, of values in 0..1, from equal ids; None without a decoder."""

    @property
    def rate(self) -> float:
        """Fraction of equal ids; 1 if there are no ids."""
        return 1 - self.differing_ids / max(1, self.ids)

    def __str__(self) -> str:
        pixels = "" if self.pixels is None else f", pixels by {self.pixels:.1e}"
        return (
            f"{self.ids - self.differing_ids:,} of {self.ids:,} ids equal ({100 * self.rate:.5f} %), "
            f"{self.differing_samples:,} of {self.samples:,} samples with another id; the tokenizer itself with "
            f"batches of half the size: {self.between_batches:,} other ids; from equal ids: vectors differ by at most "
            f"{self.vectors:.1e}, embeddings by {self.embeddings:.1e}{pixels}"
        )


def verify(folder: str | Path, tokenizer: AnyTokenizer, batches: Iterable[Tensor]) -> Agreement:
    """Compare ONNX files, run by onnxruntime, with the original tokenizer.

    Args:
        folder: folder that `export_onnx` wrote.
        tokenizer: the original, in evaluation mode.
        batches: stacked inputs from ``tokenizer.preprocess``: any number of batches of any size.

    Raises:
        CheckpointError: the files are damaged, or made from another tokenizer.
        DataError: there are no inputs.
        NonFiniteError: a vector or an embedding of either is NaN or infinite.
    """
    runtime = OnnxTokenizer(folder)
    for name, key, ours in (
        ("tokenizer", "tokenizer_sha256", fingerprint(tokenizer)),
        ("pixel decoder", "pixels_sha256", pixels_fingerprint(tokenizer)),
    ):
        if runtime.info.get(key) != ours:
            raise CheckpointError(
                f"{Path(folder) / INFO_FILE}: made from the {name} {runtime.info.get(key)}, expected {ours}, the given "
                "one; export it again"
            )

    def method(part: Part) -> Method:
        run = getattr(runtime, part)
        return lambda inputs: torch.from_numpy(run(inputs.cpu().numpy())).to(inputs.device)

    return _compare(tokenizer, batches, {part: method(part) for part in runtime.parts})


def verify_program(tokenizer: AnyTokenizer, batches: Iterable[Tensor]) -> Agreement:
    """Compare the programs of `export_program` with the original tokenizer; see `verify`."""
    return _compare(
        tokenizer, batches, {part: export_program(tokenizer, part).module() for part in parts_of(tokenizer)}
    )


@torch.no_grad()
def _compare(tokenizer: AnyTokenizer, batches: Iterable[Tensor], other: Mapping[Part, Method]) -> Agreement:
    samples = ids = differing_ids = differing_samples = between = 0
    vectors = embeddings = pixels = 0.0
    for batch in batches:
        if not len(batch):
            continue
        ours = tokenizer.encode(batch)
        wrong = other["encode"](batch) != ours
        halves = torch.cat([tokenizer.encode(half) for half in batch.split(-(-len(batch) // 2))])
        samples += len(batch)
        ids += int((ours >= 0).sum())
        differing_ids += int(wrong.sum())
        differing_samples += int(wrong.flatten(1).any(dim=1).sum())
        between += int((halves != ours).sum())
        vectors = max(vectors, _distance("decode", other["decode"](ours), tokenizer.decode(ours)))
        embeddings = max(embeddings, _distance("embed", other["embed"](ours), tokenizer.embed(ours)))
        if "decode_pixels" in other:
            assert isinstance(tokenizer, ImageTokenizer)
            every = tokenizer.encode_pixels(batch)
            pixels = max(
                pixels, _distance("decode_pixels", other["decode_pixels"](every), tokenizer.decode_pixels(every))
            )
    if not samples:
        raise DataError("verify: got no inputs, expected at least one batch with a sample")
    made = pixels if "decode_pixels" in other else None
    return Agreement(samples, ids, differing_ids, differing_samples, between, vectors, embeddings, made)


def _distance(part: Part, theirs: Tensor, ours: Tensor) -> float:
    """Return the largest absolute difference; raise NonFiniteError for NaN, which Python's ``max`` would ignore."""
    distance = float((theirs - ours).abs().max())
    if not math.isfinite(distance):
        bad = {name: int((~each.isfinite()).sum()) for name, each in (("exported", theirs), ("tokenizer", ours))}
        raise NonFiniteError(
            f"{part}: got {bad['exported']} of {theirs.numel()} numbers NaN or infinite from the export and "
            f"{bad['tokenizer']} from the tokenizer, expected finite ones; such an export must not be used"
        )
    return distance
