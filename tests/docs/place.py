"""The folder in which a page's blocks run: small things by the names that the pages use."""

import json
from pathlib import Path

from PIL import Image

from tests.commands import command
from tests.data.making import caption_shards, class_folder, pixels
from tests.docs.blocks import ROOT
from tests.training import retrieval, run_tree
from vqclip.model import CLIP
from vqclip.pixels import ConvolutionalPixelsConfig, attach

main = command("train")


def make_place(folder: Path) -> Path:
    """Make what `README.md` and the guides find in their working folder.

    - ``configs``, ``scripts``, ``benchmarks``, ``examples``: those of the checkout.
    - ``shards/{00000,00001}.tar``: 24 captioned images. ``classes``: three classes in clip_benchmark's layout.
    - ``images/<class>/*.png``: two classes of two images. ``photos/*.png`` with captions beside them: ten pairs.
      ``held-out``: four more.
    - ``runs/base``: a finished run of a tiny model, two steps on those shards, with an evaluation.
    - ``runs/pixels/tokenizer``: its tokenizers with an untrained pixel decoder.
    """
    for name in ("configs", "scripts", "benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    shards = caption_shards(folder / "shards", counts=(12, 12))
    class_folder(folder / "classes")
    class_folder(folder / "classes", split="test")
    for number in range(4):
        path = folder / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
    for number in range(14):
        path = folder / ("photos" if number < 10 else "held-out") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
        path.with_suffix(".txt").write_text(f"number {number}")
    tree = run_tree(
        folder / "runs",
        shards,
        run__name="base",
        train__steps=2,
        optim__warmup_steps=0,
        train__precision="fp32",
        evaluation=retrieval(shards),
    )
    config = folder / "tiny.json"
    config.write_text(json.dumps(tree))
    assert main(["--config", str(config)]) == 0
    config.unlink()
    model = CLIP.from_pretrained(folder / "runs" / "base" / "tokenizer")
    tokenizer = model.image
    decoder = ConvolutionalPixelsConfig(channels=8).build(tokenizer.quantizer.dim, tokenizer.num_tokens, 16)
    attach(tokenizer, decoder)
    model.save_pretrained(folder / "runs" / "pixels" / "tokenizer")
    return folder


def names(page: str) -> dict[str, object]:
    """What the blocks of a page take for granted: that of a few pages which would otherwise be mostly preparation."""
    given: dict[str, object] = {"__name__": "__main__"}
    if page in ("README.md", "page.md"):
        given["images"] = [Image.fromarray(pixels(number)) for number in range(4)]
    return given
