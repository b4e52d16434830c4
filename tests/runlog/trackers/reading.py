"""What trackers have on the disk, read back: step → scalars; a step that is there twice is an error."""

import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vqclip.runlog.metrics import read_metrics
from vqclip.runlog.trackers import view


def expected(run: Path) -> dict[int, dict[str, float]]:
    """What ``metrics.jsonl`` has, as trackers show it."""
    rows: dict[int, dict[str, Any]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        rows.setdefault(line["step"], {}).update(line)
    return {step: view(row)[0] for step, row in rows.items()}


def rounded(rows: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The values as 32-bit floats, which TensorBoard stores."""
    return {step: {k: struct.unpack("f", struct.pack("f", v))[0] for k, v in row.items()} for step, row in rows.items()}


def tensorboard(run: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in found.setdefault(event.step, {}), (tag, event.step)
            found[event.step][tag] = event.value
    return found


def wandb(run: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for file in run.glob("wandb/offline-run-*/*.wandb"):
        for step, row in _history(file):
            assert step not in found, step
            found[step] = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    return found


def _history(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a file of wandb: records of protocol buffers, each in one or several pieces within blocks of 32 KiB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from wandb.proto import wandb_internal_pb2

    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if left < 7 or kind == 0:
            place += left
            continue
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                scalars = [item for item in parsed.history.item if len(item.nested_key) == 1]  # not parts of images
                items = [(item.nested_key[0], json.loads(item.value_json)) for item in scalars]
                yield parsed.history.step.num, {key: value for key, value in items if not key.startswith("_")}
