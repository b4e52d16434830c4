"""Use a tokenizer without this library: as a `torch.export` program, or as ONNX files for onnxruntime.

    program = export_program(tokenizer, "embed")       # torch.export.ExportedProgram, any batch size
    export_onnx(tokenizer, "onnx")                     # encode.onnx, decode.onnx, embed.onnx, decode_pixels.onnx, ...
    runtime = OnnxTokenizer("onnx")                    # numpy in, numpy out; needs onnxruntime
    verify("onnx", tokenizer, batches)                 # rate of equal ids, and largest difference of embeddings

The last three need ``pip install 'vqclip[onnx]'``. On the command line: ``vqclip export --help``. Towers in
open_clip's format: `vqclip.export.open_clip`.

After `vqclip.tokenizer`, which it exports; before `vqclip.cli`.
"""

from vqclip.export.runtime import Agreement, OnnxTokenizer, verify, verify_program
from vqclip.export.to_onnx import PARTS, Part, export_onnx, export_program, parts_of

__all__ = [
    "PARTS",
    "Agreement",
    "OnnxTokenizer",
    "Part",
    "export_onnx",
    "export_program",
    "parts_of",
    "verify",
    "verify_program",
]
