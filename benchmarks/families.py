"""Every family of quantizers on real data: accuracy, usage and bits, over several seeds and numbers of bits.

Prints a table, after three trainings a family: about 5 minutes for each family on two CPU cores.

    python benchmarks/families.py --config configs/eurosat.yaml --steps 600
    python benchmarks/families.py --config configs/captions.yaml --steps 300 --families fsq vq --seeds 0 1
    python benchmarks/families.py --config configs/pretrained.yaml --bits 96 192 384 768 \\
        --set model.image.project_in.dropout=0.5

Both modalities get the same quantizer; all else is the configuration's, changed by `--set`, with the same number of
steps for all. Each run is a process of its own with one thread, of which a file of results and the log stay in
`--folder`/CONFIG. A run whose file is there is not run again, so that the command can be stopped and repeated: delete
it after a change of code, of the configuration or of the data. Prints a Markdown table of the first evaluation: means
over the seeds, and the range of the codes-only figure. Usage and perplexity are those of the images' codes over the
evaluation set, means over codebooks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENTROPY_OFF = "loss_weights: {token_entropy: 0, codebook_entropy_gap: 0}"

FAMILIES: dict[str, tuple[int, str]] = {
    # Bits of a part of the product, and the part; as many parts as give the bits asked for.
    "fsq": (8, "{kind: fsq, levels: [4, 4, 4, 4]}"),
    "fsq-8-levels": (12, "{kind: fsq, levels: [8, 8, 8, 8]}"),
    "lfq": (8, "{kind: lfq, bits: 8, entropy_temperature: 1.0}"),
    "lfq-no-entropy": (8, f"{{kind: lfq, bits: 8, {ENTROPY_OFF}}}"),
    "bsq": (8, "{kind: bsq, bits: 8, entropy_temperature: 1.0}"),
    "bsq-no-entropy": (8, f"{{kind: bsq, bits: 8, {ENTROPY_OFF}}}"),
    "vq": (8, "{kind: vq, dim: 4, codebook_size: 256}"),
    "vq-ibq": (8, "{kind: vq, dim: 4, codebook_size: 256, learning: ibq}"),
    "vq-diveq": (8, "{kind: vq, dim: 4, codebook_size: 256, learning: diveq}"),
    "simvq": (8, "{kind: simvq, dim: 4, codebook_size: 256}"),
    "simvq-blocks": (8, "{kind: simvq, dim: 4, codebook_size: 256, blocks: 2}"),
    "residual-vq": (
        32,
        "{kind: residual, depth: 4, dropout: true, layer: {kind: vq, dim: 16, codebook_size: 256}}",
    ),
    "residual-vq-shared": (
        32,
        "{kind: residual, depth: 4, dropout: true, shared: true, layer: {kind: vq, dim: 16, codebook_size: 256}}",
    ),
    "residual-vq-no-dropout": (32, "{kind: residual, depth: 4, layer: {kind: vq, dim: 16, codebook_size: 256}}"),
    "residual-vq-beam": (
        32,
        "{kind: residual, depth: 4, beam: 4, layer: {kind: vq, dim: 16, codebook_size: 256}}",
    ),
    "residual-fsq": (
        16,
        "{kind: residual, depth: 4, dropout: true, layer: {kind: fsq, levels: [4, 4], layout: uniform}}",
    ),
}
FIXED = {
    "identity": "{kind: identity, dim: 64}",
    # 12 bits a token: one codebook against two.
    "one-vq": "{kind: vq, dim: 64, codebook_size: 4096}",
    "two-vq": "{kind: product, codebooks: 2, layer: {kind: vq, dim: 32, codebook_size: 64}}",
}


def rows(families: Sequence[str], bits: Sequence[int]) -> dict[str, str]:
    """Return the quantizers of the table's rows, by name."""
    found = {name: quantizer for name, quantizer in FIXED.items() if name in families}
    for each in bits:
        for family, (part_bits, part) in FAMILIES.items():
            if family in families and each % part_bits:
                print(f"{family}: left out at {each} bits, which {part_bits} does not divide", file=sys.stderr)
            elif family in families:
                name = family if [*bits] == [128] else f"{family}-{each}"
                found[name] = f"{{kind: product, codebooks: {each // part_bits}, layer: {part}}}"
    return found


def run(config: Path, name: str, settings: Sequence[str], folder: Path) -> dict[str, Any] | None:
    """Return the results of one training run; None, with a message, if it failed."""
    done, log = folder / f"{name}.json", folder / f"{name}.log"
    if not done.exists():
        command = [sys.executable, "-m", "vqclip.train", "--config", str(config), f"run.folder={folder}"]
        command += [f"run.name={name}", *settings]
        with log.open("w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
        summary = folder / name / "summary.json"
        if status.returncode or not summary.exists():  # a run that was interrupted ends with 130
            print(f"{name}: status {status.returncode}, see {log}", file=sys.stderr)
            return None
        os.replace(summary, done)
        shutil.rmtree(folder / name)
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
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    names = [*FIXED, *FAMILIES]
    parser.add_argument("--families", nargs="+", default=names, choices=names)
    parser.add_argument("--bits", nargs="+", type=int, default=[128], help="of a token")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the configuration")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    folder = options.folder / options.config.stem
    folder.mkdir(parents=True, exist_ok=True)
    settings = options.set + ([] if options.steps is None else [f"train.steps={options.steps}"])
    kept = f"-{zlib.crc32(repr(sorted(options.set)).encode()):08x}" if options.set else ""  # of other settings
    steps, quantizers = options.steps or "all", rows(options.families, options.bits)
    pool = ThreadPoolExecutor(options.jobs)
    jobs = {}
    for seed in options.seeds:  # seed by seed, so that a part of it can be looked at
        for row, quantizer in quantizers.items():
            name, both = f"{row}-{steps}{kept}-{seed}", [f"model.{m}.quantizer={quantizer}" for m in ("image", "text")]
            jobs[row, seed] = pool.submit(run, options.config, name, [*settings, f"run.seed={seed}", *both], folder)
    try:
        found = {key: summary for key, job in jobs.items() if (summary := job.result()) is not None}
    finally:
        pool.shutdown(cancel_futures=True)
    if not found:
        sys.exit("no run succeeded")
    by_row = {row: [found[row, seed] for seed in options.seeds if (row, seed) in found] for row in quantizers}
    print("\n".join(table({row: each for row, each in by_row.items() if each})))
    sys.exit(len(found) < len(jobs))


if __name__ == "__main__":
    main()
