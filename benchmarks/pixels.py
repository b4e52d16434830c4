"""Images from ids on real and drawn data: decoders trained after the tokenizer, together with it, and for pixels alone.

Prints two tables, after 78 trainings: about 7 hours on two CPU cores.

    python benchmarks/pixels.py --data ../shared/data
    python benchmarks/pixels.py --sets scenes --families fsq --seeds 0 --share 0.25 --ways after detail

For each data set, family of quantizers and seed: a contrastive run alone; on its exported tokenizer a decoder, and a
decoder with detail codebooks; a contrastive run with a decoder beside it (`model.image.pixels`), with one weight or
several; and, for the first seed, with a weight of 1,000, which leaves next to nothing of the contrastive gradient: an
autoencoder of equal bits. `--ways` leaves some of them out. Both modalities get the same quantizer; decoder and losses
are those of `configs/pixels.yaml`.

Each run is a process of its own with one thread, under the folder; one that is done is not run again (delete its folder
after a change of code), so that the command can be stopped and repeated. Figures are means over the seeds, with the
smallest and largest; PSNR in dB, on images that no run trained on. *Cost* is the accuracy of the contrastive run
alone less that of the run with a decoder, paired by seed, with the 95 % interval of Student's t.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FAMILIES = {
    "fsq": "{kind: product, codebooks: 16, layer: {kind: fsq, levels: [8, 8, 8, 8]}}",
    "residual-vq": "{kind: product, codebooks: 4, layer: {kind: residual, depth: 4, dropout: true, "
    "layer: {kind: vq, dim: 16, codebook_size: 1024}}}",
}
ALONE = 1000.0
"""Weight of the losses on pixels where nothing else is to count."""
WAYS = ("after", "detail", "together", "alone")
"""Decoders: of a frozen tokenizer, the same with detail codebooks, beside the tokenizers, for pixels alone."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""0.975 quantile of Student's t for the mean of so many."""


class DataSet(NamedTuple):
    """A data set: its configuration, and the data to evaluate images on."""

    config: str
    steps: int
    seen: str
    unseen: str
    accuracy: str
    size: int = 64


def data_sets(data: Path) -> dict[str, DataSet]:
    """Return the data sets by name; ``data`` has the folders of real images."""
    eurosat, emoji = data / "cls_eurosat", data / "captions_noto_emoji"
    scenes = DataSet("base", 1800, "{kind: scenes, split: train}", "{kind: scenes, split: test}", "top1")
    land = f"{{kind: classes, path: {eurosat}, split: "
    faces = f"{{kind: shards, path: {emoji}/"
    captioned = DataSet("captions", 1200, f"{faces}train}}", f"{faces}val}}", "i2t_r1")
    return {
        "scenes": scenes,
        "eurosat": DataSet("eurosat", 1500, f"{land}train}}", f"{land}test}}", "top1"),
        "emoji": captioned,
        "emoji-128": captioned._replace(size=128),
    }


class Runs(NamedTuple):
    """Runs of one benchmark."""

    folder: Path
    share: float
    """Share of the steps of each contrastive configuration."""
    weights: Sequence[float]
    ways: Sequence[str]
    decoder_steps: int
    """Steps of a decoder whose tokenizer is frozen."""
    stages: int | None
    """Number of first residual stages that pixels are decoded from; None: all."""

    def run(self, name: str, config: str, *overrides: str) -> dict[str, Any] | None:
        """Return the summary of one training run; None, with a message, if it failed."""
        done = self.folder / name / "summary.json"
        if not done.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "vqclip.train", "--config", f"configs/{config}.yaml"]
            command += [f"run.folder={self.folder}", f"run.name={name}", *overrides]
            with (self.folder / f"{name}.log").open("w") as log:
                status = subprocess.run(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    check=False,
                )
            if status.returncode or not done.exists():  # a run that was interrupted ends with 0
                print(f"{name}: status {status.returncode}, see {log.name}", file=sys.stderr)
                return None
            print(f"{name}: done", file=sys.stderr)
        return json.loads(done.read_text())

    def contrastive(self, name: str, data: DataSet, family: str, seed: int, weight: float | None) -> Any:
        """Train tokenizers by captions; with a decoder beside them if ``weight`` is a number."""
        quantizer = FAMILIES[family]
        which = "retrieval" if data.accuracy.endswith("r1") else "zero_shot"
        evaluation = [f"{{kind: {which}, name: originals, data: {data.unseen}}}"]
        beside = []
        if weight is not None:
            layers, losses = decoder(self.stages)
            beside.append(f"model.image.pixels={{decoder: {layers}, losses: {losses}, weight: {weight}, one_in: 4}}")
            evaluation.append(f"{{kind: pixels, data: {data.unseen}, limit: 500}}")
        return self.run(
            name, data.config, f"run.seed={seed}", f"train.steps={round(data.steps * self.share)}",
            f"data.sources=[{data.seen}]", f"evaluation=[{', '.join(evaluation)}]",
            f"model.image.tower.image_size={data.size}",
            f"model.image.quantizer={quantizer}", f"model.text.quantizer={quantizer}", *beside,
        )  # fmt: skip

    def after(self, name: str, data: DataSet, tokenizer: str, seed: int, *more: str) -> Any:
        """Train a decoder from the codes of an exported tokenizer."""
        return self.run(
            name, "pixels", f"run.seed={seed}", f"train.steps={self.decoder_steps}",
            f"tokenizer={self.folder / tokenizer / 'tokenizer'}", f"data.sources=[{data.seen}]",
            f"evaluation=[{{kind: pixels, data: {data.unseen}, limit: 500}}]",
            f"decoder={decoder(self.stages)[0]}", *more,
        )  # fmt: skip

    def chains(self, data: DataSet, start: str, family: str, seed: int, first: bool) -> Iterator[Callable[[], Any]]:
        """Yield the runs that do not wait for one another; ``first``: the first seed, with an autoencoder."""

        def train_on_frozen() -> dict[str, Any]:
            found = {"contrastive": self.contrastive(f"{start}-contrastive", data, family, seed, None)}
            if found["contrastive"] is not None:
                more = {"after": [], "detail": ["detail={stages: 4, quantizer: {kind: fsq, levels: [8, 8, 8, 8]}}"]}
                for way in (each for each in more if each in self.ways):
                    found[way] = self.after(f"{start}-{way}", data, f"{start}-contrastive", seed, *more[way])
            return found

        def beside(weight: float) -> dict[str, Any]:
            name = f"together-{weight:g}"
            return {name: self.contrastive(f"{start}-{name}", data, family, seed, weight)}

        yield train_on_frozen
        weights = set(self.weights) if "together" in self.ways else set()
        for weight in sorted(weights | ({ALONE} if first and "alone" in self.ways else set())):
            yield lambda weight=weight: beside(weight)


def decoder(stages: int | None) -> tuple[str, str]:
    """Return decoder and losses of configs/pixels.yaml, as overrides; the decoder reads the first stages."""
    settings = yaml.safe_load(Path("configs/pixels.yaml").read_text())
    return json.dumps(settings["decoder"] | {"stages": stages}), json.dumps(settings["losses"])


def pixel_rows(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return method → row of a run's evaluation of pixels."""
    result = next(each for each in summary["results"] if each["kind"] == "pixels")
    return {row["method"]: row for row in result["pixels"]["rows"]}


def means(found: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean, and smallest and largest if there are several."""
    if not found:
        return ""
    values = [scale * each for each in found]
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def quality(start: str, runs: Sequence[dict[str, Any]], data: DataSet) -> Iterator[str]:
    """Lines of the first table: what each way to store images gives back."""
    by_seed = [pixel_rows(each) for each in runs]
    results = [next(one for one in each["results"] if one["kind"] == "pixels") for each in runs]
    for method in by_seed[0]:
        rows = [each[method] for each in by_seed if method in each]
        bits = rows[0]["bits_per_image"]
        cells = [start, method, "" if bits is None else f"{bits:,.0f}"]
        cells += [
            means([row["figures"]["psnr"] for row in rows]),
            means([row["figures"]["ssim"] for row in rows], 1, 3),
        ]
        figures = [one["figures"]["codes_only"] for one in results] if method == "codes" else []
        cells += [
            means([one[f"{which}_{data.accuracy}"] for one in figures], 100) for which in ("original", "reconstructed")
        ]
        cells.append(means([one["id_agreement"] for one in figures], 100))
        yield f"| {' | '.join(cells)} |"


def cost(
    name: str, alone: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], best: float | None, data: DataSet
) -> str:
    """Line of the second table: accuracy that a decoder beside the tokenizers costs."""
    accuracy = [
        [100 * each["results"][0]["figures"]["codes_only"][data.accuracy] for each in some] for some in (alone, runs)
    ]
    lost = [before - with_decoder for before, with_decoder in zip(*accuracy, strict=True)]
    psnr = [pixel_rows(each)["codes"]["figures"]["psnr"] for each in runs]
    mean, count = statistics.fmean(lost), len(lost)
    interval = ""
    if count in STUDENT:
        half = STUDENT[count] * statistics.stdev(lost) / math.sqrt(count)
        interval = f" ({mean - half:.1f} to {mean + half:.1f})"
    below = "" if best is None else f"{best - statistics.fmean(psnr):.1f}"
    return f"| {name} | {means(accuracy[1])} | {mean:.1f}{interval} | {means(psnr)} | {below} |"


def main() -> None:
    """Run what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of cls_eurosat and captions_noto_emoji")
    parser.add_argument("--sets", nargs="+", default=["scenes", "eurosat", "emoji"], help="or emoji-128")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--weights",
        nargs="*",
        type=float,
        default=[30.0],
        help="of the losses on pixels, together",
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--decoder-steps", type=int, default=480, help="of a decoder whose tokenizer is frozen")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the steps of each contrastive run; another share, another folder"
    )
    parser.add_argument(
        "--stages", type=int, help="first stages of residual-vq that decoders read; another number, another folder"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/pixels-table"))
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    folder = options.folder.resolve()
    runs = Runs(folder, options.share, options.weights, options.ways, options.decoder_steps, options.stages)
    sets = data_sets(options.data.resolve())
    pool = ThreadPoolExecutor(options.jobs)
    keys = [(s, name, family) for s in options.seeds for name in options.sets for family in options.families]
    jobs = {  # seed by seed, so that a part of it can be looked at
        (seed, name, family): [
            pool.submit(job)
            for job in runs.chains(sets[name], f"{name}-{family}-{seed}", family, seed, first=seed == options.seeds[0])
        ]
        for seed, name, family in keys
    }
    try:
        found = {key: {k: v for job in some for k, v in job.result().items()} for key, some in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
    print_tables(options, sets, found)
    sys.exit(any(None in each.values() for each in found.values()))


def print_tables(options: argparse.Namespace, sets: dict[str, DataSet], found: dict[Any, dict[str, Any]]) -> None:
    """Print both tables for the seeds all of whose runs succeeded."""
    lines = [
        "| run | images as | bits an image | PSNR | SSIM | originals | reconstructed | ids |",
        "|---|" + "---|" * 7,
    ]
    costs = ["| run | accuracy | cost | PSNR | dB below pixels alone |", "|---|" + "---|" * 4]
    for name in options.sets:
        for family in options.families:
            whole = [f for s in options.seeds if None not in (f := found[s, name, family]).values()]
            start = f"{name}, {family}"
            by_way = {
                way: [each for each in whole if way in each] for way in dict.fromkeys(w for f in whole for w in f)
            }
            pixels_alone = [each[f"together-{ALONE:g}"] for each in by_way.get(f"together-{ALONE:g}", [])]
            best = pixel_rows(pixels_alone[0])["codes"]["figures"]["psnr"] if pixels_alone else None
            for way, some in by_way.items():
                runs = [each[way] for each in some]
                if way != "contrastive":
                    lines += quality(f"{start}, {way}", runs, sets[name])
                if way.startswith("together"):
                    costs.append(
                        cost(f"{start}, {way}", [each["contrastive"] for each in some], runs, best, sets[name])
                    )
    print("\n".join([*lines, "", *costs]))


if __name__ == "__main__":
    main()
