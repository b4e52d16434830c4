"""Ids that rounding decides: how many of a million differ between batch sizes, threads, kernels and runtimes.

Prints a table row by row: about half a minute on two CPU cores for 1,000 images.

    python benchmarks/ids.py --tokenizer runs/eurosat/tokenizer --modality image --data DATA/cls_eurosat split=test

Compares each way of encoding with batches of 64 in torch, one thread, oneDNN on. --precision fp64 does it in float64,
without ONNX, which has no such files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor

from vqclip import load_tokenizer
from vqclip.cli.export import batches
from vqclip.data.prepare import open_images
from vqclip.export import OnnxTokenizer, export_onnx, export_program

Encode = Callable[[Tensor], Tensor]


def encode_all(encode: Encode, inputs: Tensor, size: int = 64, threads: int = 1, onednn: bool = True) -> Tensor:
    """Return the ids ``(n, N, C)`` of all inputs."""
    torch.set_num_threads(threads)
    with torch.backends.mkldnn.flags(enabled=onednn), torch.inference_mode():
        return torch.cat([encode(part) for part in inputs.split(size)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--modality", choices=("image", "text"), required=True)
    parser.add_argument("--data", required=True, nargs="+", help="path, and keys of its kind, such as split=test")
    parser.add_argument("--limit", type=int, help="use only so many samples, evenly spread")
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp32")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    tokenizer = load_tokenizer(options.tokenizer, options.modality)
    if options.precision == "fp64":
        tokenizer.double()
    source = open_images(options.data[:1], options.data[1:])
    inputs = torch.cat(list(batches(tokenizer, source, 256, options.limit)))
    expected = encode_all(tokenizer.encode, inputs)
    count = int((expected >= 0).sum())
    print(f"{' '.join(options.data)}, {options.modality}, {options.precision}: {len(inputs):,} samples, {count:,} ids")

    def report(name: str, ids: Tensor) -> None:
        differing = int((ids != expected).sum())
        print(f"| {name} | {differing} of {count:,} | {1e6 * differing / count:.2f} per million |", flush=True)

    for size in (1, 7, 256):
        report(f"batches of {size}", encode_all(tokenizer.encode, inputs, size))
    report("2 threads", encode_all(tokenizer.encode, inputs, threads=2))
    report("without oneDNN", encode_all(tokenizer.encode, inputs, onednn=False))
    report("torch.export", encode_all(export_program(tokenizer, "encode").module(), inputs))
    if options.precision == "fp64":
        return
    with tempfile.TemporaryDirectory() as folder:
        runtime = OnnxTokenizer(export_onnx(tokenizer, f"{folder}/onnx"), threads=1)
        report("onnxruntime", encode_all(lambda part: torch.from_numpy(runtime.encode(part.numpy())), inputs))


if __name__ == "__main__":
    main()
