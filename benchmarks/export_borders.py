"""How near the channels of an FSQ image tokenizer lie to a border between levels, and which ids ONNX gives otherwise.

    python benchmarks/export_borders.py --tokenizer runs/eurosat/tokenizer --data data/cls_eurosat

Prints every id that onnxruntime gives otherwise, with the distance of its nearest channel in torch (in units of a
level), and the nearest of all channels. For `Product` of `FSQ` in the layout "original".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from vqclip import load_tokenizer
from vqclip.data.pictures import open_pictures
from vqclip.export import OnnxTokenizer, export_onnx
from vqclip.export.command import batches


@torch.no_grad()
def main() -> None:
    """Encode the pictures both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer, "image")
    layer, codebooks = tokenizer.quantizer.layer, len(tokenizer.codebook_sizes)
    distances = []
    with tempfile.TemporaryDirectory() as folder:
        runtime = OnnxTokenizer(export_onnx(tokenizer, Path(folder) / "onnx"))
    for number, pixels in enumerate(batches(tokenizer, open_pictures(options.data, "test"), 50)):
        ours, theirs = tokenizer.encode(pixels), torch.from_numpy(runtime.encode(pixels.numpy()))
        features, _ = tokenizer.features(pixels)
        bounded = layer._bound(features.reshape(-1, codebooks, tokenizer.quantizer.dim // codebooks))
        level = (bounded * layer._unit(bounded)).reshape(*ours.shape, -1)
        distance = (level - level.floor() - 0.5).abs()
        distances.append(distance.flatten())
        for sample, token, codebook in (ours != theirs).nonzero().tolist():
            nearest = distance[sample, token, codebook].min(dim=0)
            print(
                f"picture {50 * number + sample}, token {token}, codebook {codebook}: channel {int(nearest.indices)} "
                f"is {float(nearest.values):.1e} from a border"
            )
    every = torch.cat(distances).sort().values
    near = int((every < 1e-5).sum())
    print(f"{len(every):,} channels, {near} nearer than 1e-5; the nearest: {[f'{d:.1e}' for d in every[:3].tolist()]}")


if __name__ == "__main__":
    main()
