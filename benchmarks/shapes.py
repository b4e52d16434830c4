"""Images of any shape beside squares of as many tokens: zero-shot accuracy on EuroSAT images cut to mixed shapes.

Prints a table, after 3 trainings for each seed: about 5 minutes on two CPU cores.

    python benchmarks/shapes.py --steps 600 --seeds 0

Every image of EuroSAT is cut to 1:1, 1:2, 2:1, 1:3 or 3:1 at its centre. The same NaFlexVit (patches of 8 pixels) sees
it whole at its own proportions, with a budget of 36 patches; squashed to a square of 48 pixels, which has 36; or as the
square at its centre. All else is `configs/eurosat.yaml`. Each run is a process of its own with one thread; one whose
results are in `--folder` is not run again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))
ARGS = "args: {patch_size: 8, embed_dim: 96, depth: 4, num_heads: 3, reg_tokens: 1, pos_embed_grid_size: [6, 6]}"
NAME = "name: naflexvit_base_patch16_gap"
ARMS = {
    "own shape": [f"model.image.tower={{kind: naflex, {NAME}, max_tokens: 36, {ARGS}}}"],
    "squashed": [
        f"model.image.tower={{kind: timm, {NAME}, image_size: 48, {ARGS}}}",
        "model.image.preprocess={mode: squash}",
        "data.transform.ratio=[0.25, 4.0]",
    ],
    "centre": [f"model.image.tower={{kind: timm, {NAME}, image_size: 48, {ARGS}}}"],
}


def cut_images(folder: Path) -> None:
    """Write the images of both splits, cut to mixed shapes, as folders of classes."""
    from vqclip.data import open_source
    from vqclip.train.tasks.kinds import load_task_config

    config = load_task_config("configs/eurosat.yaml")
    for split, data in (("train", config.data.sources[0]), ("test", config.evaluation[0].data)):
        source = open_source(data)
        for index in range(len(source)):
            sample = source.read(index)
            image = Image.open(io.BytesIO(sample.image)).convert("RGB")
            rows, columns = SHAPES[index % len(SHAPES)]
            side = min(image.height // rows, image.width // columns)
            height, width = side * rows, side * columns
            left, top = (image.width - width) // 2, (image.height - height) // 2
            path = folder / split / source.classnames[sample.label] / f"{index:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.crop((left, top, left + width, top + height)).save(path)


def train(folder: Path, arm: str, seed: int, steps: int) -> dict[str, float]:
    """Train one arm in a process of its own; return top-1 from codes and from continuous vectors, and CPU seconds."""
    path = folder / f"{arm.replace(' ', '-')}-{seed}-{steps}.json"
    if not path.exists():
        command = [sys.executable, __file__, "--folder", str(folder), "--one", arm, "--seeds", str(seed)]
        log = path.with_suffix(".log").open("w")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--steps", str(steps)], check=True, env=environment, stdout=log, stderr=log)
    found: dict[str, float] = json.loads(path.read_text())
    return found


def train_here(folder: Path, arm: str, seed: int, steps: int) -> None:
    """Train one arm in this process, and write its figures."""
    from vqclip.train import run

    name = f"{arm.replace(' ', '-')}-{seed}-{steps}"
    settings = [
        *(f"run.folder={folder / 'runs'}", f"run.name={name}", f"run.seed={seed}", f"train.steps={steps}"),
        *(f"data.sources={folder / 'train'}", f"evaluation[0].data={folder / 'test'}", "data.workers=0"),
        *("train.report_every=50", "optim.lr=1e-3", *ARMS[arm]),
    ]
    result = run("configs/eurosat.yaml", overrides=settings)
    figures = {mode: each["top1"] for mode, each in result.results[0].figures.items() if each is not None}
    (folder / f"{name}.json").write_text(json.dumps(figures | {"cpu_s": sum(os.times()[:2])}))


def main() -> None:
    """Cut the images, train all arms, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--one", choices=[*ARMS], help="train this arm alone, in this process")
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        train_here(folder, options.one, options.seeds[0], options.steps)
        return
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    if not (folder / "test").exists():
        cut_images(folder)
    jobs = [(arm, seed) for seed in options.seeds for arm in ARMS]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(lambda job: train(folder, *job, options.steps), jobs), strict=True))
    print("| images | figures of each seed |\n|---|---|")
    for arm in ARMS:
        print(f"| {arm} | {'; '.join(json.dumps(found[arm, seed]) for seed in options.seeds)} |")


if __name__ == "__main__":
    main()
