"""Every family of quantizers on a configuration's real data: accuracy, usage and bits, over several seeds.

Prints a table, after 36 trainings: about 1 hour on two CPU cores.

    python benchmarks/families.py --config configs/eurosat.yaml --steps 600
    python benchmarks/families.py --config configs/captions.yaml --steps 300 --families fsq vq --seeds 0 1

Both modalities get the same quantizer; all else is the configuration's, with the same number of steps for all. Each
run is a process of its own with one thread, under runs/families/CONFIG/; one that is done is not run again (delete its
folder after a change of code), so that the command can be stopped and repeated. Prints a Markdown table of the first
evaluation: means over the seeds, and the range of the codes-only figure. Usage and perplexity are those of the
images' codes over the evaluation set, means over codebooks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENTROPY_OFF = "loss_weights: {token_entropy: 0, codebook_entropy_gap: 0}"

FAMILIES = {
    "identity": "{kind: identity, dim: 64}",
    # 128 bits a token, as 16 codebooks of 8 bits where the family has them.
    "fsq": "{kind: product, codebooks: 16, layer: {kind: fsq, levels: [4, 4, 4, 4]}}",
    "lfq": "{kind: product, codebooks: 16, layer: {kind: lfq, bits: 8, entropy_temperature: 1.0}}",
    "lfq-no-entropy": f"{{kind: product, codebooks: 16, layer: {{kind: lfq, bits: 8, {ENTROPY_OFF}}}}}",
    "bsq": "{kind: product, codebooks: 16, layer: {kind: bsq, bits: 8, entropy_temperature: 1.0}}",
    "bsq-no-entropy": f"{{kind: product, codebooks: 16, layer: {{kind: bsq, bits: 8, {ENTROPY_OFF}}}}}",
    "vq": "{kind: product, codebooks: 16, layer: {kind: vq, dim: 4, codebook_size: 256}}",
    "simvq": "{kind: product, codebooks: 16, layer: {kind: simvq, dim: 4, codebook_size: 256}}",
    "residual-vq": "{kind: product, codebooks: 4, layer: {kind: residual, depth: 4, dropout: true, "
    "layer: {kind: vq, dim: 16, codebook_size: 256}}}",
    "residual-fsq": "{kind: product, codebooks: 8, layer: {kind: residual, depth: 4, dropout: true, "
    "layer: {kind: fsq, levels: [4, 4], layout: uniform}}}",
    # 12 bits a token: one codebook against two.
    "one-vq": "{kind: vq, dim: 64, codebook_size: 4096}",
    "two-vq": "{kind: product, codebooks: 2, layer: {kind: vq, dim: 32, codebook_size: 64}}",
}


def run(config: Path, family: str, seed: int, steps: int, folder: Path) -> dict[str, Any] | None:
    """Return the results of one training run; None, with a message, if it failed."""
    name = f"{family}-{steps}-{seed}"
    done = folder / name / "summary.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        quantizer = FAMILIES[family]
        command = [sys.executable, "-m", "vqclip.train", "--config", str(config), f"run.folder={folder}"]
        command += [f"run.name={name}", f"run.seed={seed}", f"train.steps={steps}"]
        command += [f"model.image.quantizer={quantizer}", f"model.text.quantizer={quantizer}"]
        with (folder / f"{name}.log").open("w") as log:
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
            )
        if status.returncode or not done.exists():  # a run that was interrupted ends with 0
            print(f"{name}: status {status.returncode}, see {log.name}", file=sys.stderr)
            return None
        print(f"{name}: done", file=sys.stderr)
    return json.loads(done.read_text())


def table(summaries: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Lines of Markdown, one for each family and figure of merit."""
    result = next(iter(summaries.values()))[0]["results"][0]
    names = [name for name in ("top1", "i2t_r1", "t2i_r1") if name in result["figures"]["continuous"]]
    yield (
        "| family | bits a token | bits used | "
        + " | ".join(f"{name}: continuous | {name}: codes only (range)" for name in names)
        + " | usage | perplexity | tokens counted | seeds |"
    )
    yield "|---|" + "---|" * (6 + 2 * len(names))
    for family, each in summaries.items():
        yield "| " + " | ".join([family, *_cells([one["results"][0] for one in each], names), str(len(each))]) + " |"


def _cells(results: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    usage = [result["usage"]["image"] for result in results if result["usage"]["image"]]  # without codes there is none
    yield f"{usage[0]['bits_per_token']:g}" if usage else ""
    yield f"{statistics.fmean(one['bits_used_per_token'] for one in usage):.1f}" if usage else ""
    for name in names:
        yield f"{statistics.fmean(100 * result['figures']['continuous'][name] for result in results):.1f}"
        codes = [100 * result["figures"]["codes_only"][name] for result in results] if usage else []
        yield f"{statistics.fmean(codes):.1f} ({min(codes):.1f}–{max(codes):.1f})" if codes else ""
    if not usage:
        yield from ("", "", "")
        return
    yield f"{100 * statistics.fmean(statistics.fmean(one['usage']) for one in usage):.1f} %"
    spread = statistics.fmean(statistics.fmean(one["perplexity"]) for one in usage)
    yield f"{spread:.0f} of {statistics.fmean(usage[0]['codebook_sizes']):.0f}"
    yield f"{usage[0]['tokens']:,}"


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/eurosat.yaml"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    folder = options.folder / options.config.stem
    pool = ThreadPoolExecutor(options.jobs)
    jobs = {  # seed by seed, so that a part of it can be looked at
        (family, seed): pool.submit(run, options.config, family, seed, options.steps, folder)
        for seed in options.seeds
        for family in options.families
    }
    try:
        found = {key: summary for key, job in jobs.items() if (summary := job.result()) is not None}
    finally:
        pool.shutdown(cancel_futures=True)
    if not found:
        sys.exit("no run succeeded")
    by_family = {f: [found[f, s] for s in options.seeds if (f, s) in found] for f in options.families}
    print("\n".join(table({family: each for family, each in by_family.items() if each})))
    sys.exit(len(found) < len(jobs))


if __name__ == "__main__":
    main()
