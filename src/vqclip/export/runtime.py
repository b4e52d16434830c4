"""Run a tokenizer from its ONNX files (numpy in, numpy out), and compare an exported tokenizer with the original.

Another runtime, or another batch size, adds numbers in another order, so features differ in their last bits. A feature
that close to the border between two codes gets the other code. `Agreement.between_batches` counts how often that
happens between two batch sizes of the tokenizer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vqclip.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    ShapeError,
    import_extra,
)
from vqclip.export.to_onnx import (
    INFO_FILE,
    VERSIONS,
    AnyTokenizer,
    ExportInfo,
    Part,
    export_program,
    parts_of,
)
from vqclip.io.atomic import verify_file
from vqclip.io.json_files import read_checked
from vqclip.tokenizer.stored import fingerprint, pixels_fingerprint

Method = Callable[[Tensor], Tensor]


class OnnxTokenizer:
    """The files of `export_onnx`, run by onnxruntime. Every byte is compared with its checksum first.

    Args:
        folder: folder that `export_onnx` wrote.
        threads: threads of onnxruntime within an operator; None for its default.
        providers: execution providers of onnxruntime, in order of preference.

    Attributes:
        info: content of ``export.json``.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version.
        ConfigError: onnxruntime is not installed, or has no such provider.
    """

    def __init__(
        self, folder: str | Path, threads: int | None = None, providers: tuple[str, ...] = ("CPUExecutionProvider",)
    ):
        folder = Path(folder)
        self.info = read_checked(folder / INFO_FILE, ExportInfo, VERSIONS, "export it again", "; export_onnx writes it")
        runtime = import_extra("onnxruntime", "onnx", "OnnxTokenizer ")
        available = runtime.get_available_providers()
        if unknown := [name for name in providers if name not in available]:
            raise ConfigError(f"providers: got {unknown[0]}, expected some of {', '.join(available)}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: got {threads}, expected at least 1")
        self._codebook_sizes = np.array(self.info.codebook_sizes, dtype=np.uint64)
        self._sessions: dict[Part, Any] = {}
        for part, stored in self.info.parts.items():
            path, data = folder / f"{part}.onnx", folder / f"{part}.onnx.data"
            if data.exists() and data.name not in stored.data:
                raise CheckpointError(f"{folder / INFO_FILE}: contains no digest of {data.name}; export it again")
            for name, digest in {path.name: stored.file, **stored.data}.items():
                verify_file(folder / name, digest, INFO_FILE)
            options = runtime.SessionOptions()
            if threads is not None:
                options.intra_op_num_threads = threads
            try:
                self._sessions[part] = runtime.InferenceSession(str(path), options, providers=list(providers))
            except Exception as error:  # its exceptions have no root of their own
                raise CheckpointError(f"{path}: onnxruntime cannot load it: {error}") from error

    def encode(self, inputs: np.ndarray) -> np.ndarray:
        """Encode pixels ``(B, 3, H, W)`` uint8 or token numbers ``(B, N)`` int64 to ids ``(B, N, C)`` int64.

        Raises:
            ShapeError: inputs of another shape or dtype than ``export.json`` says, or an empty batch.
            BackendError: onnxruntime fails.
        """
        return self._run("encode", inputs)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Decode ids ``(B, N, C)`` int64 to vectors ``(B, N, D)`` float32.

        Raises:
            ShapeError, BackendError: see `encode`; also for ids outside of their codebook.
        """
        return self._run("decode", ids)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Embed ids as of `decode`: joint embedding ``(B, E)`` float32, unit-norm."""
        return self._run("embed", ids)

    def decode_pixels(self, ids: np.ndarray) -> np.ndarray:
        """Decode ids as of `decode`, with detail ids if there are any, to images ``(B, 3, H, W)`` float32 in 0..1.

        Raises:
            ConfigError: the tokenizer had no pixel decoder when it was exported.
        """
        if "decode_pixels" not in self.info.parts:
            raise ConfigError(
                f"decode_pixels: got files of a tokenizer without a pixel decoder: {', '.join(self.info.parts)}; "
                "export one with a decoder"
            )
        return self._run("decode_pixels", ids)

    def _run(self, part: Part, value: np.ndarray) -> np.ndarray:
        ((name, stated),) = self.info.parts[part].inputs.items()
        shape, dtype = tuple(stated.shape[1:]), stated.dtype
        wanted = f"({', '.join(map(str, ('B', *shape)))}) {dtype}"
        if not isinstance(value, np.ndarray):
            raise ShapeError(f"{name} of {part}: got a {type(value).__name__}, expected a numpy array {wanted}")
        if value.ndim != 1 + len(shape) or value.shape[1:] != shape or str(value.dtype) != dtype:
            raise ShapeError(f"{name} of {part}: got shape {value.shape} and dtype {value.dtype}, expected {wanted}")
        if not len(value):
            raise ShapeError(f"{name} of {part}: got no sample, expected {wanted} with B from 1")
        if part != "encode":
            ids = value[..., : len(self._codebook_sizes)]  # detail ids follow
            if (outside := (ids < -1) | (ids >= self._codebook_sizes)).any():
                raise ShapeError(
                    f"{name} of {part}: got {ids[outside][0]}, expected ids from 0 to one less than the codebook sizes "
                    f"{self._codebook_sizes.tolist()}, or -1 for absent ones"
                )
        try:
            (output,) = self._sessions[part].run(None, {name: value})
        except Exception as error:  # its exceptions have no root of their own
            raise BackendError(f"{part}.onnx: onnxruntime failed on {name} of shape {value.shape}: {error}") from error
        return output


@dataclass
class Agreement:
    """Comparison of two ways of running one tokenizer on the same inputs."""

    samples: int = 0
    """Inputs compared."""
    ids: int = 0
    """Ids of the tokenizer, without padding."""
    differing_ids: int = 0
    """Ids for which the other way returns another value."""
    differing_samples: int = 0
    """Samples with such an id."""
    between_batches: int = 0
    """Ids that change in the tokenizer itself when every batch is split into two halves."""
    vectors: float = 0.0
    """Largest absolute difference of `decode`, from equal ids."""
    embeddings: float = 0.0
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
    for name, theirs, ours in (
        ("tokenizer", runtime.info.tokenizer_sha256, fingerprint(tokenizer)),
        ("pixel decoder", runtime.info.pixels_sha256, pixels_fingerprint(tokenizer)),
    ):
        if theirs != ours:
            raise CheckpointError(
                f"{Path(folder) / INFO_FILE}: made from the {name} {theirs}, expected {ours}, the given one; export it "
                "again"
            )

    def method(part: Part) -> Method:
        run = getattr(runtime, part)
        return lambda inputs: torch.from_numpy(run(inputs.cpu().numpy())).to(inputs.device)

    return _compare(tokenizer, batches, method)


def verify_program(tokenizer: AnyTokenizer, batches: Iterable[Tensor]) -> Agreement:
    """Compare the programs of `export_program` with the original tokenizer; see `verify`."""
    return _compare(tokenizer, batches, lambda part: export_program(tokenizer, part).module())


@torch.no_grad()
def _compare(tokenizer: AnyTokenizer, batches: Iterable[Tensor], method: Callable[[Part], Method]) -> Agreement:
    found, other = Agreement(), {part: method(part) for part in parts_of(tokenizer)}

    def distance(part: Part, ids: Tensor) -> float:
        ours, theirs = getattr(tokenizer, part)(ids), other[part](ids)
        largest = float((theirs - ours).abs().max())
        if not math.isfinite(largest):  # Python's max would ignore NaN
            bad = [int((~each.isfinite()).sum()) for each in (theirs, ours)]
            raise NonFiniteError(
                f"{part}: got {bad[0]} of {theirs.numel()} numbers NaN or infinite from the export and {bad[1]} from "
                "the tokenizer, expected finite ones; such an export must not be used"
            )
        return largest

    for batch in filter(len, batches):
        ours = tokenizer.encode(batch)
        wrong = other["encode"](batch) != ours
        halves = torch.cat([tokenizer.encode(half) for half in batch.split(-(-len(batch) // 2))])
        found.samples += len(batch)
        found.ids += int((ours >= 0).sum())
        found.differing_ids += int(wrong.sum())
        found.differing_samples += int(wrong.flatten(1).any(dim=1).sum())
        found.between_batches += int((halves != ours).sum())
        found.vectors = max(found.vectors, distance("decode", ours))
        found.embeddings = max(found.embeddings, distance("embed", ours))
        if "decode_pixels" in other:
            found.pixels = max(found.pixels or 0.0, distance("decode_pixels", tokenizer.encode_pixels(batch)))
    if not found.samples:
        raise DataError("verify: got no inputs, expected at least one batch with a sample")
    return found
