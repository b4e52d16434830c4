"""Run a tokenizer from its ONNX files: numpy in, numpy out, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vqclip.errors import BackendError, CheckpointError, ConfigError, ShapeError
from vqclip.export.program import PARTS, Part
from vqclip.export.to_onnx import INFO_FILE, OUTPUTS, VERSIONS, require
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.json_files import read_versioned

__all__ = ["OnnxTokenizer"]


class OnnxTokenizer:
    """The files of `export_onnx`, run by onnxruntime. Every byte is compared with its checksum first.

    Args:
        folder: folder that `export_onnx` wrote.
        threads: threads of onnxruntime within an operator; None for its default.
        providers: execution providers of onnxruntime, in order of preference.

    Attributes:
        info: content of ``export.json`` without format and versions.
        precision: ``"fp32"`` or ``"fp64"``: precision of the graphs.
        parts: the parts that the folder has; see `Part`.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version.
        ConfigError: onnxruntime is not installed, or has no such provider.
    """

    def __init__(
        self, folder: str | Path, threads: int | None = None, providers: tuple[str, ...] = ("CPUExecutionProvider",)
    ):
        folder = Path(folder)
        self.info = _read_info(folder)
        runtime = require("onnxruntime")
        self.precision = str(self.info.get("precision", "fp32"))
        available = runtime.get_available_providers()
        if unknown := [name for name in providers if name not in available]:
            raise ConfigError(f"providers: got {unknown[0]}, expected some of {', '.join(available)}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: got {threads}, expected at least 1")
        self.parts = _parts(folder, self.info)
        self._inputs = {part: _input(folder, self.info, part) for part in self.parts}
        self._codebook_sizes = _codebook_sizes(folder, self.info, self._inputs["decode"][1][-1:])
        self._sessions: dict[Part, Any] = {}
        for part in self.parts:
            path = folder / f"{part}.onnx"
            for name, digest in _file_digests(folder, self.info, part).items():
                verify_file(folder / name, digest, INFO_FILE)
            try:
                self._sessions[part] = runtime.InferenceSession(
                    str(path), _options(runtime, self.precision, threads), providers=list(providers)
                )
            except Exception as error:  # its exceptions have no root of their own
                raise CheckpointError(f"{path}: onnxruntime cannot load it: {error}") from error
            _require_interface(path, self._sessions[part], self._inputs[part], part)

    def encode(self, inputs: np.ndarray) -> np.ndarray:
        """Encode pixels ``(B, 3, H, W)`` uint8 or token numbers ``(B, N)`` int64 to ids ``(B, N, C)`` int64.

        Raises:
            ShapeError: inputs of another shape or dtype than ``export.json`` says, or an empty batch.
            BackendError: onnxruntime fails.
        """
        return self._run("encode", inputs)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Decode ids ``(B, N, C)`` int64 to vectors ``(B, N, D)``, float32 or float64.

        Raises:
            ShapeError: see `encode`; also for ids outside of their codebook.
            BackendError: onnxruntime fails.
        """
        return self._run("decode", ids)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Embed ids ``(B, N, C)`` int64: joint embedding ``(B, E)``, float32 or float64, unit-norm.

        Raises:
            ShapeError, BackendError: see `decode`.
        """
        return self._run("embed", ids)

    def decode_pixels(self, ids: np.ndarray) -> np.ndarray:
        """Decode ids ``(B, N, C)`` int64 to images ``(B, 3, H, W)`` float32 in 0..1.

        Of a decoder with detail codebooks: ``(B, N, C + Cd)``, -1 for ids that are left out.

        Raises:
            ConfigError: the tokenizer had no pixel decoder when it was exported.
            ShapeError, BackendError: see `decode`.
        """
        if "decode_pixels" not in self.parts:
            raise ConfigError(
                f"decode_pixels: got files of a tokenizer without a pixel decoder: {', '.join(self.parts)}; export "
                "one with a decoder"
            )
        return self._run("decode_pixels", ids)

    def _run(self, part: Part, value: np.ndarray) -> np.ndarray:
        name, shape, dtype = self._inputs[part]
        wanted = f"({', '.join(map(str, ('B', *shape)))}) {dtype}"
        if not isinstance(value, np.ndarray):
            raise ShapeError(f"{name} of {part}: got a {type(value).__name__}, expected a numpy array {wanted}")
        if value.ndim != 1 + len(shape) or value.shape[1:] != shape or str(value.dtype) != dtype:
            raise ShapeError(f"{name} of {part}: got shape {value.shape} and dtype {value.dtype}, expected {wanted}")
        if not len(value):
            raise ShapeError(f"{name} of {part}: got no sample, expected {wanted} with B from 1")
        if part != "encode":
            self._require_ids(name, part, value)
        try:
            (output,) = self._sessions[part].run(None, {name: value})
        except Exception as error:  # its exceptions have no root of their own
            raise BackendError(f"{part}.onnx: onnxruntime failed on {name} of shape {value.shape}: {error}") from error
        return output

    def _require_ids(self, name: str, part: Part, ids: np.ndarray) -> None:
        outside = (ids < -1) | (ids >= self._codebook_sizes)
        if outside.any():
            raise ShapeError(
                f"{name} of {part}: got {ids[outside][0]}, expected ids from 0 to one less than the codebook sizes "
                f"{self._codebook_sizes.tolist()}, or -1 for absent ones"
            )


def _options(runtime: Any, precision: str, threads: int | None) -> Any:
    options = runtime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    if precision == "fp64":  # operators would be fused into ones with float32 attributes
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / INFO_FILE
    try:
        return read_versioned(path, VERSIONS, "export it again")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); vqclip.export.export_onnx writes it"
        ) from error


def _parts(folder: Path, info: dict[str, Any]) -> tuple[Part, ...]:
    found = info.get("parts")
    if not isinstance(found, dict) or set(found) not in ({*PARTS}, {*PARTS, "decode_pixels"}):
        raise CheckpointError(
            f"{folder / INFO_FILE}: describes other parts than {', '.join(PARTS)} and decode_pixels; export it again"
        )
    return (*PARTS, "decode_pixels") if "decode_pixels" in found else PARTS


def _input(folder: Path, info: dict[str, Any], part: Part) -> tuple[str, tuple[int, ...], str]:
    """Return name, shape without the batch, and dtype of the input of a part."""
    try:
        ((name, tensor),) = info["parts"][part]["inputs"].items()
        shape, dtype = tensor["shape"], tensor["dtype"]
        if not all(type(size) is int for size in shape[1:]) or not isinstance(dtype, str):
            raise ValueError(f"shape {shape!r}, dtype {dtype!r}")
        return name, tuple(shape[1:]), dtype
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / INFO_FILE}: does not describe the input of {part}.onnx ({error!r}); export it again"
        ) from error


def _codebook_sizes(folder: Path, info: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return ``(C,)`` uint64: K of each codebook."""
    try:
        if not all(type(size) is int for size in info["codebook_sizes"]):
            raise ValueError(f"{info['codebook_sizes']!r}, expected whole numbers")
        sizes = np.array(info["codebook_sizes"], dtype=np.uint64)
        if sizes.shape != shape:
            raise ValueError(f"shape {sizes.shape}, expected {shape}")
        return sizes
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder / INFO_FILE}: does not give the codebook sizes ({error!r})") from error


def _require_interface(path: Path, session: Any, stated: tuple[str, tuple[int, ...], str], part: Part) -> None:
    """Check that a graph takes the inputs in `INFO_FILE` and has the output of its part; else raise CheckpointError."""
    found = [(each.name, tuple(each.shape[1:]), each.type) for each in session.get_inputs()]
    name, shape, dtype = stated
    if found != [(name, shape, f"tensor({dtype})")]:
        raise CheckpointError(f"{path}: takes {found}, but {INFO_FILE} says {name} {shape} {dtype}; export it again")
    if (outputs := [each.name for each in session.get_outputs()]) != [OUTPUTS[part]]:
        raise CheckpointError(f"{path}: gives {outputs}, expected {[OUTPUTS[part]]}; export it again")


def _file_digests(folder: Path, info: dict[str, Any], part: Part) -> dict[str, FileDigest]:
    """Return the digests of a part's graph and, if its weights are in a file of their own, of that file."""
    stated, name = info["parts"][part], f"{part}.onnx"
    try:
        digests = {name: FileDigest(**stated["file"])}
        if "data" in stated or (folder / f"{name}.data").exists():
            name = f"{name}.data"
            digests[name] = FileDigest(**stated["data"][name])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / INFO_FILE}: contains no digest of {name}; export it again") from error
    return digests
