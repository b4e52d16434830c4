"""Checkpoints whose hashes are right and whose content is not are refused, or work; any flipped bit is noticed."""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vqclip
from tests.models import BUSY_VQ, FSQ, reseal, tiny_model
from vqclip import checkpoint
from vqclip.errors import CheckpointError
from vqclip.losses import ContrastiveLoss
from vqclip.model import CLIP
from vqclip.tokenizer.folder import CARD_FILE, PROCESSOR_FILE
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.guards import GuardConfig, Guards
from vqclip.train.optim import OptimConfig, Schedule
from vqclip.train.resume import resume
from vqclip.train.step import ComputeConfig, TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask

EACH = 20
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
VALUES = (None, True, -1, 0, 7, 0.5, 1e308, 2**70, "x", "", [], {}, [1], {"a": 1}, DEEP, float("nan"), float("inf"))


def training_step() -> TrainStep:
    model, optim = tiny_model(BUSY_VQ, FSQ).build(), OptimConfig(warmup_steps=1)
    optimizer = optim.build(model)
    task = ContrastiveTask(model, ContrastiveLoss())
    return TrainStep(task, optimizer, Schedule(optim, 9), ComputeConfig(), None, 0, Guards(GuardConfig()))


def update(step: TrainStep) -> None:
    """Change everything that a checkpoint holds."""
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    step.scaler.step(step.optimizer)
    for _ in range(GuardConfig().spikes.window):
        step.guards.judge_numbers(torch.ones(1, dtype=torch.float64))
    quantizers = step.model.quantizers().items()
    counts = {name: each(torch.ones(4, each.dim)).stats.local() for name, each in quantizers}
    step.guards.windows.count(counts, torch.tensor(False))


def checkpointer(folder: Path, step: TrainStep) -> Checkpointer:
    return Checkpointer(folder, {"run.seed": 0, "data": {"sha256": "0"}}, step, 2, in_background=False)


def resealed(folder: Path) -> None:
    """Give a changed checkpoint the hashes that fit."""
    reseal(folder / "model")
    checkpoint.write_manifest(folder, int(folder.name.removeprefix("step-")))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in range(len(tree)) if isinstance(tree, list) else list(tree):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def mutated(tree: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    where, key = draw.choice(list(places(tree)))
    how = draw.randrange(4)
    if how == 0:
        del where[key]
    elif how == 1 and isinstance(where, dict):
        where["surplus"] = where.pop(key)
    elif how == 2:
        where[key] = [where[key]]
    else:
        where[key] = draw.choice(VALUES)
    return tree


def forge(file: Path, draw: random.Random) -> None:
    """Change one place in a file of JSON, or in the header of one of tensors, or one of its numbers."""
    data = file.read_bytes()
    if file.suffix == ".json":
        file.write_text(json.dumps(mutated(json.loads(data), draw)))
        return
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    if draw.random() < 0.3:
        start = draw.randrange(len(body) // 4) * 4
        body[start : start + 4] = draw.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\xff\xff"])
    else:
        header = mutated(header, draw)
    packed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + body)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, step = tmp_path_factory.mktemp("forged"), training_step()
    for done in (1, 2):
        update(step)
        checkpointer(folder, step).save(done, {"replaced": {"damaged image": 3}, "caption_lengths": {}})
    return folder


def load(path: Path) -> None:
    vqclip.load_tokenizer(path / "model", modality="image")
    CLIP.from_pretrained(path / "model")


FORGED = ("state.json", "state.safetensors", "optimizer.safetensors", "model/model.safetensors", "model/config.json")


@pytest.mark.parametrize("name", FORGED)
def test_forged_checkpoints_end_in_checkpoint_errors(tmp_path: Path, saved: Path, name: str) -> None:
    step, refused = training_step(), 0
    path = tmp_path / "step-00000002"

    def restore() -> None:
        resume(checkpointer(tmp_path, step))
        update(step)

    for number in range(EACH):
        shutil.copytree(saved / path.name, path)
        forge(path / name, random.Random(f"{name}-{number}"))
        resealed(path)
        use: Callable[[], None] = (lambda: load(path)) if name == "model/config.json" else restore
        try:
            use()
        except CheckpointError:
            refused += 1
        shutil.rmtree(path)
    assert refused > EACH // 2


@pytest.mark.parametrize(
    ("key", "change"),
    [("replaced", {"x": 10**400}), ("guards", {"skipped": -5}), ("caption_lengths", {"12": 10**30})],
)
def test_forged_counts_end_in_checkpoint_errors(tmp_path: Path, saved: Path, key: str, change: dict) -> None:
    path = tmp_path / "step-00000002"
    shutil.copytree(saved / path.name, path)
    state = json.loads((path / "state.json").read_text())
    state.get("state", state)[key].update(change)
    (path / "state.json").write_text(json.dumps(state))
    resealed(path)
    with pytest.raises(CheckpointError, match=r"state.json"):
        resume(checkpointer(tmp_path, training_step()))


def test_tensors_of_absurd_size_are_refused_from_the_header(tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "step-00000002"
    shutil.copytree(saved / path.name, path)
    rows = 2**24
    header = json.dumps({"zzz/codes": {"dtype": "I64", "shape": [2, rows], "data_offsets": [0, 16 * rows]}}).encode()
    with (path / "state.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 16 * rows)  # sparse
    resealed(path)
    with pytest.raises(CheckpointError, match=r"state.safetensors: contains 33554432 numbers; expected at most"):
        resume(checkpointer(tmp_path, training_step()))


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_checkpoint_is_set_aside_on_resume(tmp_path, saved, name, value, caplog):
    shutil.copytree(saved, tmp_path / "all")
    path = tmp_path / "all" / "step-00000002"
    with (path / name).open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        start = next(e["data_offsets"][0] for n, e in header.items() if n != "__metadata__" and e["dtype"] == "F32")
        file.seek(8 + length + start)
        file.write(struct.pack("<f", value))
    resealed(path)
    assert resume(checkpointer(tmp_path / "all", training_step()))[0] == 1
    assert "contain NaN or infinity" in caplog.text
    assert {each.name for each in (tmp_path / "all").iterdir()} == {"step-00000001", "set-aside-step-00000002"}


def flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("flips", [25, pytest.param(1000, marks=pytest.mark.faults)])
def test_any_flipped_bit_is_detected(tmp_path: Path, saved: Path, flips: int) -> None:
    """First the file is drawn, so that small ones get as many flips, then the byte and the bit."""
    path, seen = shutil.copytree(saved / "step-00000002", tmp_path / "step-00000002"), set()
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.name not in (CARD_FILE, PROCESSOR_FILE))
    for number in range(flips):
        draw = random.Random(f"0-{number}")
        file = draw.choice(files)
        place, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
        seen.add(file)
        flip(file, place, bit)
        for use in (checkpoint.load, load) if file.parent.name == "model" else (checkpoint.load,):
            with pytest.raises(CheckpointError, match=file.name):
                use(path)
        flip(file, place, bit)
    assert len(seen) == len(files) == 6


def test_every_byte_of_a_configuration_is_verified(tmp_path: Path, saved: Path) -> None:
    path = shutil.copytree(saved / "step-00000002", tmp_path / "step-00000002")
    file = path / "model" / "config.json"
    for place in range(file.stat().st_size):
        flip(file, place, place % 8)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            vqclip.load_tokenizer(path / "model", modality="image")
        flip(file, place, place % 8)
    load(path)
