"""Export the parts of a tokenizer as ONNX files, with a JSON file that describes their inputs and outputs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vqclip import __version__
from vqclip.errors import ConfigError
from vqclip.export.float64 import DECOMPOSITIONS
from vqclip.export.program import AnyTokenizer, Part, example_inputs, export_program, parts_of
from vqclip.io.atomic import digest_file, replace_folder, require_replaceable
from vqclip.io.json_files import add_checksum
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.folder import ID_LAYOUT_VERSION
from vqclip.tokenizer.stored import fingerprint, pixels_fingerprint

__all__ = ["INFO_FILE", "OUTPUTS", "VERSIONS", "export_onnx", "require"]

INFO_FILE = "export.json"
VERSIONS = {"format": "vqclip-onnx", "format_version": 2, "id_layout": ID_LAYOUT_VERSION}
_PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64"}
_OPSET = 18
"""The first opset with bitwise operators, which binary codes need."""
OUTPUTS: dict[Part, str] = {
    "encode": "ids",
    "decode": "vectors",
    "embed": "joint_embedding",
    "decode_pixels": "pixels",
}
"""Names of the outputs; none equals an operator's name (such as embedding), which nodes inside a graph have."""


def export_onnx(tokenizer: AnyTokenizer, folder: str | Path) -> Path:
    """Write ``encode.onnx``, ``decode.onnx``, ``embed.onnx`` and ``export.json``, for any batch size from 1.

    A tokenizer with a pixel decoder has ``decode_pixels.onnx`` as well. Weights of more than 1.5 GiB are in a file
    beside the graph, such as ``encode.onnx.data``. Inputs are those of `export_program`. An existing export is replaced
    atomically (`vqclip.io.atomic.replace_folder`).

    Args:
        tokenizer: on the CPU, with weights in float32, or in float64 for graphs that compute in float64.
        folder: the folder to write.

    Returns:
        The folder.

    Raises:
        ConfigError: a package of the extra ``onnx`` is missing, the tokenizer has no codes, its weights are neither in
            float32 nor in float64 on the CPU, or the folder contains something else.
    """
    folder = Path(folder)
    require_replaceable(folder, INFO_FILE)
    for package in ("onnx", "onnxscript"):
        require(package)
    weights = next(tokenizer.parameters())
    if weights.dtype not in _PRECISIONS or weights.device.type != "cpu":
        raise ConfigError(
            f"export: got weights in {weights.dtype} on {weights.device}, expected float32 or float64 on the CPU: "
            "tokenizer.float().cpu()"
        )
    precision = _PRECISIONS[weights.dtype]
    programs = {part: export_program(tokenizer, part) for part in parts_of(tokenizer)}

    def fill(aside: Path) -> None:
        for part, program in programs.items():
            _translate(program, part, precision, aside / f"{part}.onnx")
        (aside / INFO_FILE).write_bytes(add_checksum({"precision": precision, **_info(tokenizer, aside, programs)}))

    replace_folder(folder, fill)
    return folder


def require(package: str) -> Any:
    """Import a package of the extra ``onnx``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package}: not installed ({error}); pip install 'vqclip[onnx]'") from error


def _translate(program: ExportedProgram, part: Part, precision: str, path: Path) -> None:
    table: dict[Any, Any] = {torch.ops.aten.median.dim: _median}
    if precision == "fp64":
        table |= DECOMPOSITIONS
    translated = torch.onnx.export(
        program.run_decompositions(table),
        input_names=[_input(part)],
        output_names=[OUTPUTS[part]],
        opset_version=_OPSET,
        dynamo=True,
        custom_translation_table={
            torch.ops.aten.__rshift__.Tensor: _shift_right,
            torch.ops.aten.scalar_tensor.default: _scalar,
        },
        verbose=False,
    )
    assert translated is not None
    translated.save(path, external_data=False)


def _input(part: Part) -> str:
    return "inputs" if part == "encode" else "ids"


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Compute ``aten.median`` by sorting, which ONNX supports."""
    ordered, index = x.sort(dim=dim)
    middle = (x.shape[dim] - 1) // 2
    values, places = ordered.narrow(dim, middle, 1), index.narrow(dim, middle, 1)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _shift_right(x: Any, by: Any) -> Any:
    """Compute ``x >> by`` of int64: ONNX shifts only unsigned integers. The bits of -1, an absent id, are not used."""
    from onnxscript import opset18

    op: Any = opset18  # its annotations do not fit this use
    unsigned = 13  # ONNX's number of uint64
    signed = 7  # and of int64
    return op.Cast(op.BitShift(op.Cast(x, to=unsigned), op.Cast(by, to=unsigned), direction="RIGHT"), to=signed)


def _scalar(s: float, dtype: int, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """Make a constant; the exporter's own translation would round it to float32 on the way to float64.

    The arguments are named as those of ``aten.scalar_tensor``: torch 2.8 looks for them by name.
    """
    from onnxscript import ir, opset18

    op: Any = opset18
    return op.Constant(value=ir.tensor(s, dtype=ir.DataType(dtype)))


def _info(tokenizer: AnyTokenizer, folder: Path, programs: dict[Part, ExportedProgram]) -> dict[str, Any]:
    """Return the content of ``export.json``; a ``null`` in a shape is the batch size."""
    return {
        **VERSIONS,
        "vqclip": __version__,
        "torch": str(torch.__version__),
        "opset": _OPSET,
        "modality": tokenizer.modality,
        "tokenizer_sha256": fingerprint(tokenizer),
        "pixels_sha256": pixels_fingerprint(tokenizer),
        "codebook_sizes": list(tokenizer.codebook_sizes),
        "num_tokens": tokenizer.num_tokens,
        "embed_dim": tokenizer.embed_dim,
        "preprocess": _preprocess(tokenizer),
        "parts": {
            part: _part_info(program, part, example_inputs(tokenizer, part), folder / f"{part}.onnx")
            for part, program in programs.items()
        },
    }


def _part_info(program: ExportedProgram, part: Part, inputs: Tensor, path: Path) -> dict[str, Any]:
    data = path.with_name(f"{path.name}.data")  # torch moves weights of more than 1.5 GiB to it
    return {
        "file": digest_file(path).model_dump(),
        **({"data": {data.name: digest_file(data).model_dump()}} if data.exists() else {}),
        "inputs": {_input(part): _tensor_info(inputs)},
        "outputs": {OUTPUTS[part]: _tensor_info(program.module()(inputs))},
    }


def _tensor_info(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [None, *tensor.shape[1:]]}


def _preprocess(tokenizer: AnyTokenizer) -> dict[str, Any]:
    """Describe the preprocessing before ``encode.onnx``, for implementations in other languages."""
    if isinstance(tokenizer, ImageTokenizer):
        return {
            "kind": "image",
            "image_size": tokenizer.tower.image_size,
            "layout": "RGB, transparency on white, (B, 3, H, W) uint8; normalisation is part of the graph",
            **tokenizer.config.preprocess.model_dump(mode="json"),
        }
    return {
        "kind": "text",
        "context_length": tokenizer.tower.num_tokens,
        "vocabulary": tokenizer.preprocess.describe(),
    }
