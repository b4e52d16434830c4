"""Ids in lower precision: encode.onnx with weights in int8, and the tokenizer with weights in bfloat16.

Prints a table, after about 1 minute on two CPU cores for 1,000 images.

    python benchmarks/export.py --tokenizer runs/eurosat/tokenizer --modality image --data data/cls_eurosat split=test

Prints the share of ids that equal those in float32, and the cosine between the embeddings of both. int8: onnxruntime's
dynamic quantization (weights in int8 by channel, activations by tensor), of all layers and of matrix products alone.
bfloat16: weights rounded to it with arithmetic in float32, and the whole tower in it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vqclip import load_tokenizer
from vqclip.cli.export import batches
from vqclip.data.prepare import open_images
from vqclip.export import export_onnx

Encode = Callable[[Tensor], Tensor]


def int8(folder: Path, **settings: Any) -> Encode:
    """Return ``encode`` of encode.onnx quantized by onnxruntime."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = folder.parent / "int8.onnx"
    quantize_dynamic(folder / "encode.onnx", target, per_channel=True, weight_type=QuantType.QInt8, **settings)
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    print(f"  {target.stat().st_size:,} bytes, float32 {(folder / 'encode.onnx').stat().st_size:,}")
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


def round_weights(tokenizer: Any) -> Encode:
    """Return ``encode`` with the weights of the tower rounded to bfloat16."""
    other = copy.deepcopy(tokenizer)
    with torch.no_grad():
        for weight in (*other.tower.parameters(), *other.project_in.parameters()):
            weight.copy_(weight.bfloat16().float())
    return other.encode


def under_autocast(tokenizer: Any) -> Encode:
    """Return ``encode`` under bfloat16 autocast."""
    return lambda inputs: tokenizer.encode(inputs, "bf16")


@torch.no_grad()
def report(name: str, tokenizer: Any, encode: Encode, inputs: list[Tensor]) -> None:
    """Print one line of the table."""
    ours = torch.cat([tokenizer.encode(batch) for batch in inputs])
    theirs = torch.cat([encode(batch) for batch in inputs])
    real = ours >= 0
    a, b = (torch.cat([tokenizer.embed(part) for part in ids.split(50)]) for ids in (ours, theirs))
    cosine = (a * b).sum(-1)
    rate = 100 * float((ours == theirs)[real].float().mean())
    print(f"| {name} | {rate:.3f} | {float(cosine.mean()):.4f} | {float(cosine.min()):.4f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--modality", choices=("image", "text"), required=True)
    parser.add_argument("--data", required=True, nargs="+", help="path, and keys of its kind, such as split=test")
    parser.add_argument("--limit", type=int, help="number of inputs to use, evenly spread")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    tokenizer = load_tokenizer(options.tokenizer, options.modality)
    inputs = list(batches(tokenizer, open_images(options.data[:1], options.data[1:]), 50, options.limit))
    print("| encoder | ids equal, % | cosine of embeddings, mean | least |")
    print("|---|---|---|---|")
    report("bfloat16 weights", tokenizer, round_weights(tokenizer), inputs)
    report("bfloat16 autocast", tokenizer, under_autocast(tokenizer), inputs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = export_onnx(tokenizer, Path(temporary) / "onnx")
        report("int8, all layers", tokenizer, int8(folder), inputs)
        report("int8, matrix products", tokenizer, int8(folder, op_types_to_quantize=["MatMul", "Gemm"]), inputs)


if __name__ == "__main__":
    main()
