"""Shards to ids: samples a second and core, `vqclip tokenize` against a plain loop over open_clip's own pipeline.

Prints rates and ratios, after about 1 minute on two CPU cores for 400 pairs.

    python benchmarks/tokens.py --tokenizer runs/captions/tokenizer --shards DATA/captions_noto_emoji/val \\
        --peer-python PEER/bin/python

Both encode the images and captions of the same shards with the same tokenizer, batch size and one thread. The plain
loop is what one would write by hand: open_clip's evaluation pipeline (`get_wds_dataset`, Pillow, its transform),
`encode` for every batch, and one `numpy.savez` at the end. `vqclip tokenize` writes finished, hashed token shards.
"Encoding alone" is that of batches in memory, which neither can beat. Rounds alternate; time is CPU time, so other work
on the machine disturbs little. PEER is made as benchmarks/data.py says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def main() -> None:
    from tqdm import tqdm

    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.side:
        serve(SIDES[options.side](options))
        return
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    sides = dict.fromkeys(("ours", "nothing"), sys.executable)
    if options.peer_python:
        sides["peer"] = options.peer_python
    children = {side: start(options, side, python) for side, python in sides.items()}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in tqdm(range(options.rounds + 1), desc="rounds", disable=None):
        for side, child in children.items():
            rate = ask(child)
            if number:  # the first round warms caches up, and indexes
                rates[side].append(rate)
    for child in children.values():
        child.communicate("\n")
    names = {"ours": "vqclip tokenize", "nothing": "encoding alone", "peer": "loop over open_clip's pipeline"}
    print(f"{options.modality}, batch {options.batch}, {options.rounds} rounds, samples/s per core:")
    for side, values in rates.items():
        print(f"  {names[side]:<31} {statistics.median(values):7.0f}  ({min(values):.0f} to {max(values):.0f})")
    for side in [*rates][1:]:
        ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates[side], strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  ratio, {names['ours']} / {names[side]}: {statistics.median(ratios):.2f} {spread}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shards", type=Path, required=True, help="folder of tars with images and .txt")
    parser.add_argument("--peer-python", help="Python with webdataset 0.2.86; default: measure vqclip alone")
    parser.add_argument("--modality", choices=["image", "both"], default="both")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    return parser.parse_args()


def start(options: argparse.Namespace, side: str, python: str) -> subprocess.Popen[str]:
    command = [python, __file__, "--side", side, "--shards", str(options.shards), "--tokenizer", options.tokenizer]
    command += ["--batch", str(options.batch), "--modality", options.modality]
    sources = Path(__file__).parents[1] / "src"  # PEER sees the packages beside an editable install, not what it names
    environment = os.environ | {"PYTHONPATH": str(sources)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        sys.exit("a measured process ended early; see its message above")
    return json.loads(answer)


def serve(one_pass: Callable[[], int]) -> None:
    """In a measured process: one pass over the shards for every line, answered with samples per CPU second."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        if not line.strip():
            return
        begun = time.process_time()
        count = one_pass()
        print(json.dumps(count / (time.process_time() - begun)), flush=True)


def tokenizers(options: argparse.Namespace) -> tuple[Any, Any]:
    from vqclip import load_tokenizer

    return load_tokenizer(options.tokenizer, "image"), load_tokenizer(options.tokenizer, "text")


def ours(options: argparse.Namespace) -> Callable[[], int]:
    """All of the command but the loading of the tokenizer, which the loop does not repeat either."""
    import torch

    from vqclip.data import CaptionShardsConfig
    from vqclip.tokenize_dataset import job

    source = CaptionShardsConfig(path=str(options.shards))
    load = job._load_tokenizers
    loaded = cache(lambda: load(make_options(Path()), torch.device("cpu")))
    job._load_tokenizers = lambda *_: loaded()

    def make_options(out: Path) -> job.Options:
        return job.Options(
            tokenizer=options.tokenizer,
            data=source,
            out=out,
            modality=options.modality,
            batch_size=options.batch,
            device="cpu",
        )

    def one_pass() -> int:
        with tempfile.TemporaryDirectory() as folder:
            return job.tokenize(make_options(Path(folder) / "out")).samples

    return one_pass


def nothing(options: argparse.Namespace) -> Callable[[], int]:
    from vqclip.data import CaptionShardsConfig, EvalSet

    image, text = tokenizers(options)
    source = CaptionShardsConfig(path=str(options.shards)).build()
    batches = [
        (batch.images, text.preprocess([captions[0] for captions in batch.captions]))
        for batch in EvalSet(source, image.transform, options.batch)
    ]

    def one_pass() -> int:
        for images, texts in batches:
            image.encode(images)
            if options.modality == "both":
                text.encode(texts)
        return sum(len(images) for images, _ in batches)

    return one_pass


def peer(options: argparse.Namespace) -> Callable[[], int]:
    import numpy as np
    import open_clip
    from open_clip_train.data import get_wds_dataset

    image, text = tokenizers(options)
    size = image.tower.image_size
    # To 0..1, which is what the tokenizer takes; the tower normalises.
    transform = open_clip.image_transform(size, is_train=False, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    arguments = argparse.Namespace(
        val_data="::".join(str(tar) for tar in sorted(options.shards.glob("*.tar"))),
        val_num_samples=None,
        batch_size=options.batch,
        world_size=1,
        workers=0,
    )
    info = get_wds_dataset(arguments, transform, is_train=False, tokenizer=lambda caption: text.preprocess([caption]))

    def one_pass() -> int:
        found: dict[str, list[Any]] = {"image": [], "text": []}
        for images, texts in info.dataloader:
            found["image"].append(image.encode(images).numpy())
            if options.modality == "both":
                found["text"].append(text.encode(texts).numpy())
        with tempfile.TemporaryDirectory() as folder:
            arrays = {kind: np.concatenate(parts).astype(np.int16) for kind, parts in found.items() if parts}
            np.savez(Path(folder) / "ids.npz", **arrays)
        return sum(map(len, found["image"]))

    return one_pass


SIDES = {"ours": ours, "nothing": nothing, "peer": peer}

if __name__ == "__main__":
    main()
