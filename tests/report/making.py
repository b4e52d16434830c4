"""Small folders of runs, made of the files that a run writes, without any training."""

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from vqclip.evaluation import Result, write_evaluations

CODEBOOKS = 6
CONFIG = """
run: {name: made}
data: {sources: [{kind: scenes, split: train}]}
model:
  image: {tower: {kind: convolutional}, quantizer: {kind: product, codebooks: 6, layer: {kind: fsq, levels: [8, 8]}}}
  text: {tower: {kind: transformer}, quantizer: {kind: product, codebooks: 6, layer: {kind: fsq, levels: [8, 8]}}}
loss: {kind: contrastive}
optim: {lr: 0.001, warmup_steps: 5}
train: {steps: 400, batch_size: 16}
"""
HEALTH: dict[str, Any] = {
    "collapse": {},
    "divergence": {},
    "loss": "loss/contrastive",
    "chance": math.log(16),
    "codes": {"image": 64, "text": 64},
    "warmup_steps": 5,
    "end": 400,
}
ABOUT = {"model": ["image: a tower"], "sources": ["scenes split train"], "processes": 1, "health": HEALTH}


def line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics of a healthy run; ``changes`` have ``__`` for ``/``."""
    figures: dict[str, Any] = {"step": step, "loss/total": 2.7 - step / 400, "loss/contrastive": 2.7 - step / 400}
    figures |= {"grad_norm": 1.0, "lr": 1e-3, "images_per_second": 300.0, "data_wait": 0.01, "data/replaced": 0.0}
    for modality in ("image", "text"):
        figures |= {f"{modality}/tokens": 1000.0, f"{modality}/usage_if_uniform": 1.0, f"{modality}/usage": 0.8}
        figures |= {f"{modality}/embedding_cosine": 0.1, f"{modality}/perplexity": 40.0, f"{modality}/bits_used": 30.0}
        for number in range(CODEBOOKS):
            figures |= {f"{modality}/{number}/usage": 0.8, f"{modality}/{number}/perplexity": 40.0}
            figures |= {f"{modality}/{number}/bits_used": 5.0}
    return figures | {name.replace("__", "/"): value for name, value in changes.items()}


def make_run(folder: Path, change: Callable[[int], dict[str, Any]] = lambda step: {}, steps: int = 400) -> Path:
    """A run with a report every 20 steps and an evaluation every 100; ``change`` changes the line of a step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "about.json").write_text(json.dumps(ABOUT))
    lines = []
    for step in range(20, steps + 1, 20):
        lines.append(line(step, **change(step)))
        if step % 100 == 0:
            rates = {f"eval/pairs/{mode}/i2t_r1": step / 500 for mode in ("continuous", "quantized", "codes_only")}
            lines.append({"step": step, **rates, **{name: each for name, each in lines[-1].items() if name in rates}})
    write_lines(folder / "metrics.jsonl", lines)
    if steps >= 100:
        rates = {key: {"i2t_r1": steps // 100 / 5} for key in ("continuous", "quantized", "codes_only")}
        result = Result("pairs", "retrieval", rates, {"i2t_r1": 0.1}, 100, None, 100, {})
        write_evaluations(folder, steps // 100 * 100, [result])
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


class Page(HTMLParser):
    """Elements, attributes and texts of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attributes

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.texts).split())
