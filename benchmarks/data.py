"""Shards to tensors: images a second and core, vqclip's loader against open_clip's pipeline.

Prints rates and ratios, after about 5 minutes on two CPU cores.

    python benchmarks/data.py --shards DATA/captions_pomological/train --peer-python PEER/bin/python
    python benchmarks/data.py ... --photos 480x360      # the same images, put together to JPEGs of this size
    python benchmarks/data.py ... --other OLD/src       # another version of vqclip beside this one

All read the same JPEGs with the same random crop, output size, vocabulary and batch size, in one process with one
thread each; rounds alternate, and time is CPU time, so other work on the machine disturbs little. vqclip's loader gives
uint8 and leaves normalisation to the device; to compare equal outputs, its batches are turned into normalised floats
here, inside the time measured (the figure without that is printed as well). vqclip's sides keep freed memory, as
`vqclip.train` does; with `GLIBC_TUNABLES` as in benchmarks/losses.py all sides do.

open_clip's training code needs webdataset 0.2.86 (it fails with 1.x) and pandas. Make it an environment that sees the
packages of the one you have, but for these:

    python -m venv PEER
    python -c "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])" > \\
        PEER/lib/python3.11/site-packages/others.pth        # your version of Python
    PEER/bin/pip install --no-deps webdataset==0.2.86 pandas python-dateutil six pytz tzdata
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


SIDES = {
    "ours": "vqclip, normalised floats",
    "uint8": "vqclip, uint8",
    "other": "other vqclip, uint8",
    "peer": "open_clip + webdataset",
}


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.side:
        sides = {"ours": ours, "uint8": ours_in_bytes, "other": ours_in_bytes, "peer": peer}
        if options.side != "peer":
            from vqclip.process.memory import keep_freed_memory

            keep_freed_memory()
        serve(sides[options.side](options), options)
        return
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VQCLIP_CACHE"] = f"{folder}/cache"
        if options.photos:
            width, height = map(int, options.photos.split("x"))
            options.shards = put_together(options.shards, Path(folder, "photos"), width, height)
        for size in options.size:
            compare(options, size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="folder of tars with .jpg and .txt")
    parser.add_argument("--photos", metavar="WxH", help="put the images together to JPEGs of this size")
    parser.add_argument("--peer-python", help="Python with webdataset 0.2.86 (see above); default: without open_clip")
    parser.add_argument("--other", type=Path, help="src folder of another version of vqclip")
    parser.add_argument("--size", type=int, nargs="+", default=[64, 224], help="side of the images, in pixels")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=20, help="batches a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace, size: int) -> None:
    """Alternate rounds of all sides; print medians and the ratios."""
    from tqdm import tqdm

    sides = {"ours": sys.executable, "uint8": sys.executable}
    sides |= {"other": sys.executable} if options.other else {}
    sides |= {"peer": options.peer_python} if options.peer_python else {}
    children = {side: start(options, side, python, size) for side, python in sides.items()}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in tqdm(range(options.rounds + 1), desc=f"{size} px", disable=None):
        for side, child in children.items():
            rate = ask(child)
            if number:  # the first round warms caches up
                rates[side].append(rate)
    for child in children.values():
        child.communicate("\n")
    print(f"{size} px, batch {options.batch}, {options.rounds} rounds of {options.batches} batches, images/s per core:")
    for side, values in rates.items():
        print(f"  {SIDES[side]:<26} {statistics.median(values):7.0f}  ({min(values):.0f} to {max(values):.0f})")
    for side, against in itertools.product(("ours", "uint8"), ("other", "peer")):
        if against in rates and (side, against) != ("ours", "other"):
            ratios = [mine / theirs for mine, theirs in zip(rates[side], rates[against], strict=True)]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"  ratio, {SIDES[side]} / {SIDES[against]}: {statistics.median(ratios):.2f} {spread}")


def start(options: argparse.Namespace, side: str, python: str, size: int) -> subprocess.Popen[str]:
    command = [python, __file__, "--side", side, "--shards", str(options.shards), "--size", str(size)]
    command += ["--batch", str(options.batch), "--batches", str(options.batches)]
    environment = {**os.environ}
    if side == "other":  # with indexes of its own, whose format may differ
        environment |= {"PYTHONPATH": str(options.other), "VQCLIP_CACHE": f"{os.environ['VQCLIP_CACHE']}-other"}
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


def serve(one_pass: Callable[[], Iterator[tuple]], options: argparse.Namespace) -> None:
    """In a measured process: one pass for every line of input, answered with images per CPU second."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        if not line.strip():
            return
        start, count = time.process_time(), 0
        for images, texts in one_pass():
            assert images.shape == (options.batch, 3, options.size[0], options.size[0])
            assert texts.shape == (options.batch, 77)
            count += len(images)
        assert count == options.batch * options.batches, count
        print(json.dumps(count / (time.process_time() - start)), flush=True)


def ours(options: argparse.Namespace) -> Callable[[], Iterator[tuple]]:
    import torch

    in_bytes = ours_in_bytes(options)
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (MEAN, STD))

    def one_pass() -> Iterator[tuple]:
        for images, texts in in_bytes():
            yield images.float().sub_(mean).div_(std), texts

    return one_pass


def ours_in_bytes(options: argparse.Namespace) -> Callable[[], Iterator[tuple]]:
    from vqclip.data import CaptionShardsConfig, DataConfig
    from vqclip.towers import BPE

    config = DataConfig(sources=(CaptionShardsConfig(path=str(options.shards)),), workers=0)
    data = config.build(options.size[0], BPE(77).with_lengths, options.batch, seed=0)
    next_step = 0

    def one_pass() -> Iterator[tuple]:
        nonlocal next_step
        for batch in data.batches(next_step, next_step + options.batches):
            yield batch.images, batch.texts
        next_step += options.batches

    return one_pass


def peer(options: argparse.Namespace) -> Callable[[], Iterator[tuple]]:
    import open_clip
    from open_clip_train.data import get_wds_dataset

    transform = open_clip.image_transform(options.size[0], is_train=True, mean=MEAN, std=STD)
    arguments = argparse.Namespace(
        train_data="::".join(str(tar) for tar in sorted(options.shards.glob("*.tar"))),
        train_num_samples=options.batch * options.batches,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=options.batch,
        world_size=1,
        workers=0,
        seed=0,
    )
    info = get_wds_dataset(arguments, transform, is_train=True, tokenizer=open_clip.get_tokenizer("ViT-B-32"))
    epoch = 0

    def one_pass() -> Iterator[tuple]:
        nonlocal epoch
        info.set_epoch(epoch)
        epoch += 1
        yield from info.dataloader

    return one_pass


def read_pairs(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        for name, data in members.items():
            if name.endswith(".jpg"):
                yield data, members[name.removesuffix("jpg") + "txt"]


def put_together(shards: Path, folder: Path, width: int, height: int, count: int = 4000) -> Path:
    """Write shards of JPEGs that are filled with parts of images, so that their details are those of photographs."""
    from PIL import Image

    folder.mkdir()
    pairs = itertools.cycle(read_pairs(shards))
    for shard in range(4):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * count // 4, (shard + 1) * count // 4):
                canvas, caption, stream, x, y = Image.new("RGB", (width, height)), b"", io.BytesIO(), 0, 0
                while y < height:
                    data, caption = next(pairs)
                    part = Image.open(io.BytesIO(data)).convert("RGB")
                    canvas.paste(part, (x, y))
                    x, y = (x + part.width, y) if x + part.width < width else (0, y + part.height)
                canvas.save(stream, "JPEG", quality=90)
                for ending, content in (("jpg", stream.getvalue()), ("txt", caption)):
                    member = tarfile.TarInfo(f"{number:09d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


if __name__ == "__main__":
    main()
