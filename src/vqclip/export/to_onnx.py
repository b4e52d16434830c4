"""Write the parts of a tokenizer as graphs of torch operators, and these as ONNX files with a JSON description.

Shapes: B samples, N tokens, C codebooks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vqclip import __version__
from vqclip.config import Modality
from vqclip.errors import ConfigError, import_extra
from vqclip.io.atomic import FileDigest, digest_file, replace_folder, require_replaceable, write_text
from vqclip.io.json_files import Strict, add_checksum
from vqclip.nn.precision import evaluation_mode
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.folder import CARD_FILE, ID_LAYOUT_VERSION
from vqclip.tokenizer.stored import fingerprint, pixels_fingerprint

AnyTokenizer = ImageTokenizer | TextTokenizer
Part = Literal["encode", "decode", "embed", "decode_pixels"]
"""Exported methods of a tokenizer; decode_pixels is only of one with a pixel decoder."""
PARTS: tuple[Part, ...] = ("encode", "decode", "embed")
"""Parts of every tokenizer, in the order of export."""

_EXAMPLES = 3
"""Batch size of example inputs; not 1, which a graph could take for a constant."""
INFO_FILE = "export.json"
VERSIONS = {"format": "vqclip-onnx", "format_version": 3, "id_layout": ID_LAYOUT_VERSION}
_OPSET = 18
"""The first opset with bitwise operators, which binary codes need."""
OUTPUTS: dict[Part, str] = {
    "encode": "ids",
    "decode": "vectors",
    "embed": "joint_embedding",
    "decode_pixels": "pixels",
}
"""Names of the outputs; none equals an operator's name (such as embedding), which nodes inside a graph have."""


class _Method(nn.Module):
    """One method of a tokenizer as a module, for `torch.export`."""

    def __init__(self, tokenizer: AnyTokenizer, name: str):
        super().__init__()
        self.tokenizer, self.name = tokenizer, name

    def forward(self, inputs: Tensor) -> Tensor:
        return getattr(self.tokenizer, self.name)(inputs)


def parts_of(tokenizer: AnyTokenizer) -> tuple[Part, ...]:
    """Return the parts of a tokenizer, in the order of export."""
    return PARTS if tokenizer.pixels is None else (*PARTS, "decode_pixels")


def export_program(tokenizer: AnyTokenizer, part: Part) -> ExportedProgram:
    """Export a part of a tokenizer as a program for any batch size from 1; `torch.export.save` writes it to a file.

    The graph has the tokenizer's weights, in their dtype, on their device. It takes the inputs of the method of that
    name, with these restrictions:

    - pixels ``(B, 3, H, W)`` must be uint8;
    - token numbers ``(B, N)`` and ids ``(B, N, C)`` int64 must have all N positions, with padding.

    Values are not checked: a number outside the vocabulary or an id outside its codebook gives no clear error.

    Args:
        tokenizer: the tokenizer; in evaluation mode during the export.
        part: the part.

    Raises:
        ConfigError: an unknown part, or a tokenizer without codes.
    """
    if part not in (parts := parts_of(tokenizer)):
        raise ConfigError(f"part: got {part!r}, expected one of {', '.join(parts)}, the parts of this tokenizer")
    tokenizer.require_image_size("an exported graph")
    tokenizer.require_codes("export:")
    with evaluation_mode(tokenizer), torch.no_grad():
        shapes = ({0: Dim("batch", min=1, max=2**20)},)
        inputs = example_inputs(tokenizer, part)
        return torch.export.export(_Method(tokenizer, part), (inputs,), dynamic_shapes=shapes, strict=False)


def example_inputs(tokenizer: AnyTokenizer, part: Part) -> Tensor:
    """Return inputs of a part: black pixels ``(3, 3, H, W)`` uint8, empty captions ``(3, N)`` or id 0."""
    device = tokenizer.device
    if part != "encode":
        codebooks = len(tokenizer.codebook_sizes)
        if part == "decode_pixels" and tokenizer.pixels is not None and tokenizer.pixels.detail is not None:
            codebooks += len(tokenizer.pixels.detail.codebook_sizes)
        return torch.zeros(_EXAMPLES, tokenizer.num_tokens, codebooks, dtype=torch.int64, device=device)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.zeros(_EXAMPLES, 3, size, size, dtype=torch.uint8, device=device)
    return tokenizer.preprocess([""] * _EXAMPLES).to(device)


class ArrayInfo(Strict):
    """An input or output."""

    dtype: str
    """Name of the dtype, as of numpy."""
    shape: list[int | None] = Field(min_length=2)
    """Sizes; null is the batch size, which comes first."""


class PartInfo(Strict):
    """A part of a tokenizer in `INFO_FILE`."""

    file: FileDigest
    """Digest of the graph."""
    data: dict[str, FileDigest] = {}
    """Digest of the file of its weights, if they are not in the graph."""
    inputs: dict[str, ArrayInfo] = Field(min_length=1, max_length=1)
    """Name → its input."""
    outputs: dict[str, ArrayInfo] = Field(min_length=1, max_length=1)
    """Name → its output."""


class ExportInfo(Strict):
    """Content of `INFO_FILE` without its versions and checksum."""

    vqclip: str
    """Version that wrote it."""
    torch: str
    """Version that wrote it."""
    opset: int
    """Version of ONNX's operators."""
    modality: Modality
    """Kind of the tokenizer's input."""
    tokenizer_sha256: str
    """`fingerprint` of the tokenizer."""
    pixels_sha256: str | None
    """`pixels_fingerprint` of the tokenizer."""
    codebook_sizes: list[Annotated[int, Field(ge=1)]]
    """K of each codebook."""
    num_tokens: int
    """N, tokens a sample."""
    embed_dim: int
    """E, width of the joint embedding."""
    preprocess: dict[str, Any]
    """Preparation of the inputs of ``encode``."""
    parts: dict[Part, PartInfo]
    """Graphs by the name of the method."""


_CARD = """# {title}

The {modality} half of a tokenizer made with vqclip {vqclip}, as ONNX graphs.

- {num_tokens} tokens; sizes of the codebooks: {codebook_sizes}
- embeddings of width {embed_dim}
- shapes, preparation of the inputs, and digests: `export.json`

```python
from vqclip.export import OnnxTokenizer

ids = OnnxTokenizer(folder).encode(inputs)  # numpy in, numpy out
```
"""


def export_onnx(tokenizer: AnyTokenizer, folder: str | Path) -> Path:
    """Write ``encode.onnx``, ``decode.onnx``, ``embed.onnx``, ``export.json`` and a card, for any batch size from 1.

    A tokenizer with a pixel decoder has ``decode_pixels.onnx`` as well. Weights of more than 1.5 GiB are in a file
    beside the graph, such as ``encode.onnx.data``. Inputs are those of `export_program`. An existing export is replaced
    atomically (`vqclip.io.atomic.replace_folder`).

    Args:
        tokenizer: on the CPU, with weights in float32; onnxruntime lacks convolutions and norms in float64.
        folder: the folder to write.

    Returns:
        The folder.

    Raises:
        ConfigError: a package of the extra ``onnx`` is missing, the tokenizer has no codes, its weights are not in
            float32 on the CPU, or the folder contains something else.
    """
    folder = Path(folder)
    require_replaceable(folder, INFO_FILE, CARD_FILE, "*.onnx", "*.onnx.data")
    for package in ("onnx", "onnxscript"):
        import_extra(package, "onnx", "export ")
    weights = next(tokenizer.parameters())
    if weights.dtype != torch.float32 or weights.device.type != "cpu":
        raise ConfigError(
            f"export: got weights in {weights.dtype} on {weights.device}, expected float32 on the CPU: "
            "tokenizer.float().cpu()"
        )
    programs = {part: export_program(tokenizer, part) for part in parts_of(tokenizer)}

    def fill(aside: Path) -> None:
        parts = {}
        for part, program in programs.items():
            inputs, path = example_inputs(tokenizer, part), aside / f"{part}.onnx"
            _translate(program, part, path)
            data = path.with_name(f"{path.name}.data")  # torch moves weights of more than 1.5 GiB to it
            parts[part] = PartInfo(
                file=digest_file(path),
                data={data.name: digest_file(data)} if data.exists() else {},
                inputs={_input(part): _describe_array(inputs)},
                outputs={OUTPUTS[part]: _describe_array(program.module()(inputs))},
            )
        info = ExportInfo(
            vqclip=__version__,
            torch=str(torch.__version__),
            opset=_OPSET,
            modality="image" if isinstance(tokenizer, ImageTokenizer) else "text",
            tokenizer_sha256=fingerprint(tokenizer),
            pixels_sha256=pixels_fingerprint(tokenizer),
            codebook_sizes=list(tokenizer.codebook_sizes),
            num_tokens=tokenizer.num_tokens,
            embed_dim=tokenizer.embed_dim,
            preprocess=_preprocess(tokenizer),
            parts=parts,
        )
        (aside / INFO_FILE).write_bytes(add_checksum(VERSIONS | info.model_dump(mode="json")))
        write_text(aside / CARD_FILE, _CARD.format(title=folder.resolve().name, **info.model_dump()))

    replace_folder(folder, fill)
    return folder


def _translate(program: ExportedProgram, part: Part, path: Path) -> None:
    translated = torch.onnx.export(
        program.run_decompositions({torch.ops.aten.median.dim: _median}),
        input_names=[_input(part)],
        output_names=[OUTPUTS[part]],
        opset_version=_OPSET,
        dynamo=True,
        custom_translation_table={torch.ops.aten.__rshift__.Tensor: _shift_right},
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


def _describe_array(tensor: Tensor) -> ArrayInfo:
    return ArrayInfo(dtype=str(tensor.dtype).removeprefix("torch."), shape=[None, *tensor.shape[1:]])


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
        "vocabulary": tokenizer.preprocess.description,
    }
