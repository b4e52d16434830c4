import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoint.making import restore, save_checkpoint
from vqclip import checkpoint
from vqclip.checkpoint.optimizer import optimizer_tensors
from vqclip.errors import CheckpointError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
STATE = {"lr": 0.1 + 0.2, "tiny": 5e-324, "big": 2**80, "text": "π\n", "none": None, "levels": [8, 5.0], "scaler": {}}


def make(device: str = "cpu", seed: int = 0, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    named = list(model.named_parameters())
    decay, rest = [p for p in named if p[1].ndim > 1], [p for p in named if p[1].ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    images = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(number))
    device = next(model.parameters()).device
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (number + 1)
    optimizer.zero_grad()
    model(images.to(device)).square().mean().backward()
    optimizer.step()


def writer(model: nn.Module) -> Callable[[Path], None]:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return lambda folder: save_file(tensors, folder / "model.safetensors")


def save(folder: Path, number: int, keep_last: int = 3, state: dict | None = None, seed: int = 0) -> Path:
    model, optimizer = make(seed=seed)
    step(model, optimizer, number)
    return save_checkpoint(folder, number, optimizer, writer(model), STATE if state is None else state, keep_last)


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_state_comes_back_exactly(tmp_path):
    path = save(tmp_path, 1000)
    assert path.name == "step-00001000"
    loaded = checkpoint.load(path)
    assert loaded.step == 1000
    assert loaded.state == STATE
    assert type(loaded.state["levels"][1]) is float
    assert {"manifest.json", "state.json", "optimizer.safetensors", "model"} == set(os.listdir(path))
    assert load_file(loaded.model_folder / "model.safetensors")


@pytest.mark.parametrize(("value", "told"), [([1, float("nan")], "Out of range"), (torch.zeros(1), "Object of ty")])
def test_state_that_json_lacks_is_refused(tmp_path, value, told):
    with pytest.raises(CheckpointError, match=rf"state\.json: cannot be stored: {told}"):
        save(tmp_path, 1, state={"a": {"b": value}})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_resume_equals_going_on(tmp_path, device, options, memory_format):
    model, optimizer = make(device, **options)
    model.to(memory_format=memory_format)
    for number in range(3):
        step(model, optimizer, number)
    path = save_checkpoint(tmp_path, 3, optimizer, writer(model))
    saved = snapshot(optimizer)
    for number in range(3, 6):
        step(model, optimizer, number)

    other, resumed = make(device, seed=1, **options)
    other.to(memory_format=memory_format)
    step(other, resumed, 99)  # stale state that must go
    other.load_state_dict(load_file(path / "model" / "model.safetensors"))
    restore(path, resumed)
    for key, value in snapshot(resumed).items():
        assert torch.equal(value, saved[key]), key
        assert value.dtype == saved[key].dtype
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert resumed.state[twin][key].device == value.device
            assert resumed.state[twin][key].stride() == value.stride()

    for number in range(3, 6):
        step(other, resumed, number)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, twin)
    for key, value in snapshot(optimizer).items():
        assert torch.equal(value, snapshot(resumed)[key])


def test_unused_parameters_have_no_state(tmp_path):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, unused], lr=0.3)
    used.grad = torch.ones(3)
    optimizer.step()
    twins = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    resumed = torch.optim.AdamW(twins, lr=0.5)
    resumed.state[twins[1]] = {"exp_avg": torch.ones(2)}  # stale: the checkpoint has none of it
    restore(save_checkpoint(tmp_path, 1, optimizer), resumed)
    assert torch.equal(resumed.state[twins[0]]["exp_avg"], optimizer.state[used]["exp_avg"])
    assert twins[1] not in resumed.state


def test_another_optimizer_is_refused_by_name_and_changes_nothing(tmp_path):
    model, optimizer = make(foreach=True)
    step(model, optimizer, 0)
    path = save_checkpoint(tmp_path, 1, optimizer)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(5, 2), nn.Linear(2, 2))
    named = [(name, p) for name, p in other.named_parameters() if name != "0.bias"]
    resumed = torch.optim.AdamW([{"params": named[:1]}, {"params": named[1:]}])
    with pytest.raises(CheckpointError) as caught:
        restore(path, resumed)
    message = str(caught.value)
    assert "unexpected 0.bias/exp_avg" in message
    assert "2.weight/exp_avg: got shape (2, 4), expected (2, 5)" in message
    assert not resumed.state
    with pytest.raises(CheckpointError, match=r"(?s)does not fit the running optimizer:.*unexpected 0\.weight/exp_avg"):
        restore(path, torch.optim.SGD(model.parameters()))
    _, resumed = make(foreach=False)
    restore(path, resumed)
    assert resumed.param_groups[0]["foreach"] is False


def test_keep_last_removes_the_oldest(tmp_path):
    for number in (1, 2, 10, 9):
        save(tmp_path, number, keep_last=2)
    # Step 9 came after step 10: the newer folder is not counted and not touched.
    assert names(tmp_path) == ["step-00000002", "step-00000009", "step-00000010"]


def test_what_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    unlink = os.unlink

    def fail(path, **options):
        if str(path).endswith(".nfs1"):
            raise OSError(errno.EBUSY, "busy", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", fail)
    for name in ("step-00000001", ".tmp-step-00000002", ".replaced-step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".nfs1").touch()
    save(tmp_path, 3, keep_last=4)  # which restores the replaced one, and replaces it
    for number in (2, 3, 3, 4, 3):
        save(tmp_path, number, keep_last=2)
    assert [name for name in names(tmp_path) if name[0] != "."] == ["step-00000003", "step-00000004"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    for number in (1, 3):
        assert f"step-0000000{number}: cannot be removed: [Errno 16] busy: '.nfs1'" in caplog.text


def test_latest(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / ".tmp-step-00000005").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path) is None
    for number in (99_999_999, 100_000_000):  # nine digits sort after eight
        save(tmp_path, number)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100000000"
    assert names(tmp_path) == ["notes", "step-100000000", "step-99999999"]


def test_damaged_newest_is_reported_and_the_one_before_used(tmp_path, caplog):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    (bad / "optimizer.safetensors").write_bytes(b"")
    with caplog.at_level(logging.ERROR):
        assert checkpoint.latest(tmp_path) == good
    assert "step-00000002/optimizer.safetensors: 0 bytes" in caplog.text
    shutil.rmtree(good / "model")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be used") as caught:
        checkpoint.latest(tmp_path)
    assert "missing files: ['model/model.safetensors']" in str(caught.value)


def test_damaged_checkpoint_is_replaced_and_newer_ones_set_aside(tmp_path):
    save(tmp_path, 1)
    bad, worse = save(tmp_path, 2), save(tmp_path, 3)
    (bad / "state.json").unlink()
    (worse / "state.json").unlink()
    checkpoint.set_aside_newer(tmp_path, 2)
    assert (tmp_path / "set-aside-step-00000003").is_dir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert checkpoint.latest(tmp_path) != save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == bad
    save(tmp_path, 3)
    checkpoint.set_aside_newer(tmp_path, 2)
    assert (tmp_path / "set-aside-step-00000003-2").is_dir()


def test_foreign_files_links_and_renamed_folders_are_refused(tmp_path):
    path = save(tmp_path / "run", 1)
    for name in ("a/.DS_Store", ".ipynb_checkpoints/state-checkpoint.json", "Thumbs.db", "model/@eaDir/x"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()
    (path / ".snapshot").symlink_to("/etc")
    assert checkpoint.load(path)
    (path / "model" / "extra.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"files not in manifest\.json: \['model/extra\.pt'\]"):
        checkpoint.load(path)
    (path / "model" / "extra.pt").unlink()
    (path / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="neither a plain file nor a folder"):
        checkpoint.load(path)
    (path / "link").unlink()
    renamed = path.rename(path.parent / "step-00000007")
    with pytest.raises(CheckpointError, match="the folder was renamed"):
        checkpoint.load(renamed)
    with pytest.raises(CheckpointError, match="expected a name like step-00001000"):
        checkpoint.load(renamed.rename(tmp_path / "best"))


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoint.VERSIONS, "version", 5)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version is 5, this vqclip reads 4; use the vqclip that wrote it"):
        checkpoint.load(path)


@pytest.mark.parametrize("call", ["pathlib.Path.write_bytes", "pathlib.Path.rename", "os.fsync", "os.pwrite"])
@pytest.mark.parametrize("number", [1, 2], ids=["same step", "new step"])
def test_failed_write_leaves_the_last_good_one(tmp_path, monkeypatch, call, number):
    save(tmp_path, 1)

    monkeypatch.setattr(call, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, number, keep_last=1, seed=5)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, number, keep_last=1, seed=5)
    assert checkpoint.latest(tmp_path) == tmp_path / f"step-{number:08d}"


def test_interrupted_replacement_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1, state={"try": 1})
    rename = Path.rename

    def fail_second(self, target):
        if Path(target).name == "step-00000001":
            raise OSError(errno.EIO, "input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(CheckpointError, match="input/output error"):
        save(tmp_path, 1, state={"try": 2})
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found).state == {"try": 1}
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert checkpoint.load(tmp_path / "step-00000001").state == {"try": 1}
