"""Runs whose towers are frozen, in part or for some steps: what is stored, how they resume, what they export."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import vqclip
from tests.models import BUSY_RESIDUAL, FSQ, change, reseal, tiny_model
from tests.train.test_grad_cache import batch_number
from tests.training import all_equal, contrastive_step, run, run_tree, run_until, weights
from vqclip.checkpoint import OPTIMIZER_FILE, load
from vqclip.cli.main import main
from vqclip.data import Batch
from vqclip.errors import CheckpointError, OtherRunError
from vqclip.io.atomic import digest_file
from vqclip.io.json_files import read_json
from vqclip.model import CLIP
from vqclip.tokenizer.stored import fingerprint
from vqclip.train import TrainConfig
from vqclip.train.frozen_weights import FrozenWeights
from vqclip.train.main import build_step, build_task
from vqclip.train.tasks.contrastive import towers_draw

STEPS = 6
LORA = {"lora": {"rank": 2, "alpha": 8}}


def tree(folder, shards, image="all", text="all", **changes):
    towers = {"model__image__tower__train": image, "model__text__tower__train": text}
    every = {"train__steps": STEPS, "train__checkpoint_every": 1, "train__keep_checkpoints": 9}
    return run_tree(folder, shards, FSQ, **({"train__precision": "fp32"} | every | towers | changes))


def build(config):
    config = TrainConfig.model_validate(config)
    return build_step(config, build_task(config, torch.device("cpu")))


def checkpoint(folder, step=STEPS):
    return folder / "tiny" / "checkpoints" / f"step-{step:08d}"


def moments(path):
    return load_file(path / OPTIMIZER_FILE)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, shards):
    """A finished run with a frozen image tower and adapters in the text tower."""
    folder = tmp_path_factory.mktemp("frozen")
    run(tree(folder, shards, "none", LORA), str(folder / "cache"))
    return folder


@pytest.fixture
def copy(frozen, tmp_path, shards):
    shutil.copytree(frozen / "tiny", tmp_path / "tiny")
    return tmp_path, tree(tmp_path, shards, "none", LORA, train__steps=STEPS)


def test_frozen_weights_are_stored_once(frozen):
    stored = load_file(frozen / "tiny" / "frozen" / "model.safetensors")
    assert {".".join(name.split(".")[:2]) for name in stored} == {"image.tower", "text.tower"}
    for step in (1, STEPS):
        held = weights(frozen, step)
        assert not held.keys() & stored.keys()
        assert {name.partition(".lora_")[1] for name in held if ".tower." in name} == {".lora_"}
    named = {name.rpartition("/")[0] for name in moments(checkpoint(frozen))}
    assert named == {name for name in weights(frozen, STEPS) if not name.endswith("_std")} & named
    assert not {name for name in named if ".tower." in name and ".lora_" not in name}
    assert any(".lora_B" in name for name in named)


def test_exports_hold_everything_and_merge_adapters(frozen, capsys):
    """The run's own export, that of its checkpoint and the checkpoint itself are one tokenizer, made without peft."""
    run_folder = frozen / "tiny"
    assert main(["export-tokenizer", str(run_folder), "--out", str(frozen / "out")]) == 0
    exported = load_file(run_folder / "tokenizer" / "model.safetensors")
    assert all_equal(exported, load_file(frozen / "out" / "model.safetensors"))
    assert not any("lora" in name or "base_layer" in name for name in exported)
    config, _ = read_json(run_folder / "tokenizer" / "config.json")
    assert "train" not in config["image"]["tower"]
    assert not {"frozen", "adapters"} & config.keys()
    folders = (frozen / "out", checkpoint(frozen) / "model")
    assert len({fingerprint(vqclip.load_tokenizer(folder, "text")) for folder in folders}) == 1
    plain = CLIP.from_pretrained(run_folder / "tokenizer")
    assert not any(parameter.requires_grad for parameter in plain.image.tower.parameters())
    vqclip.load_tokenizer(checkpoint(frozen) / "model", "image", encode=False)


def test_merged_weights_embed_as_the_adapters_do(frozen, shards):
    step = build(tree(frozen, shards, "none", LORA))
    model = step.model.eval()
    adapters = load_file(checkpoint(frozen) / "model" / "model.safetensors")
    model.load_state_dict(adapters | load_file(frozen / "tiny" / "frozen" / "model.safetensors"))
    merged = CLIP.from_pretrained(frozen / "tiny" / "tokenizer").text
    tokens = merged.preprocess([f"a {color} star" for color in ("red", "blue", "green", "grey")] * 8)
    with torch.no_grad():
        torch.testing.assert_close(merged.continuous(tokens), model.text.continuous(tokens), atol=1e-5, rtol=0)
        same = (merged(tokens).ids == model.text(tokens).ids).float().mean()
        assert same > 0.99
        assert fingerprint(model.text) == fingerprint(merged)
        for name, each in model.text.tower.named_parameters():
            if ".lora_B" in name:
                assert each.abs().max() > 0  # the adapters have learned something
                each.zero_()
        assert not torch.equal(merged.continuous(tokens), model.text.continuous(tokens))


@pytest.mark.parametrize(("image", "text"), [({"last": 1}, {"from_step": 3}), ({"from_step": 3}, LORA)])
def test_a_run_that_stops_anywhere_continues_bit_for_bit(tmp_path, shards, image, text):
    """Before, at and after the step in which a tower unfreezes, 3."""
    once, often = tmp_path / "once", tmp_path / "often"
    run(tree(once, shards, image, text))
    for stop in (2, 3, 4):
        run_until(stop, tree(often, shards, image, text))
    run(tree(often, shards, image, text))
    assert_same(once, often)


def assert_same(one, other):
    assert all_equal(weights(one, STEPS), weights(other, STEPS))
    assert all_equal(moments(checkpoint(one)), moments(checkpoint(other)))
    exported = [load_file(folder / "tiny" / "tokenizer" / "model.safetensors") for folder in (one, other)]
    assert all_equal(*exported)


def test_a_tower_trains_from_its_step_on(tmp_path, shards):
    """Until then it has its first weights and no state in the optimizer."""
    config = tree(tmp_path, shards, {"from_step": 3}, train__save_in_background=False)
    step = build(config)
    assert [step.move_to_step(number) for number in range(STEPS)] == [False] * 3 + [True] + [False] * 2
    first = step.model.image.tower.state_dict()
    run(config)
    for done, changed in ((2, False), (3, False), (4, True), (STEPS, True)):
        held = weights(tmp_path, done)
        same = [torch.equal(held[f"image.tower.{name}"], value) for name, value in first.items()]
        assert not any(same) if changed else all(same)
        slots = [name for name in moments(checkpoint(tmp_path, done)) if name.startswith("image.tower.")]
        assert bool(slots) == changed


def wrapped_parameters(config):
    """Numbers of parameters whose gradients DDP averages, in steps 0, 2 and 3."""
    step = build(config)
    found = []
    for number in (0, 2, 3):
        step.move_to_step(number)
        found.append((id(step.network), len(step.network._build_params_for_reducer()[0])))
    ours = [each.requires_grad for each in step.model.parameters()]
    return [count for _, count in found], found[0][0] == found[1][0], sum(ours)


def test_ddp_averages_the_gradients_of_parameters_that_train(ranks, tmp_path, shards):
    for counts, is_same, total in ranks(2, wrapped_parameters, tree(tmp_path, shards, {"from_step": 3}, "none")):
        assert counts[0] == counts[1] < counts[2] == total
        assert is_same


def test_random_numbers_of_a_waiting_tower_belong_to_the_identity(tmp_path, shards):
    args = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.5}
    drawn = {}
    for train in ("all", "none", {"from_step": 3}, {"last": 1}, LORA, {"lora": {"rank": 2, "dropout": 0.5}}):
        step = build(tree(tmp_path, shards, train, model__image__tower__args=args))
        drawn[json.dumps(train)] = towers_draw(step.model)
    assert list(drawn.values()) == [True, False, True, True, False, True], drawn


def test_the_whole_run_of_a_network_with_batch_norm(tmp_path, shards):
    """Trained in its last block, exported, loaded, and its statistics are those of the beginning."""
    tower = {"kind": "timm", "name": "resnet10t", "image_size": 32, "train": {"last": 1}}
    changes = {"train__steps": 2, "optim__warmup_steps": 0, "model__image__tower": tower}
    run(tree(tmp_path, shards, **changes))
    stored = load_file(tmp_path / "tiny" / "frozen" / "model.safetensors")
    assert any("layer4.0.bn1.running_mean" in name for name in stored)
    assert any("layer4.0.conv1.weight" in name for name in weights(tmp_path, 2))
    tokenizer = vqclip.load_tokenizer(tmp_path / "tiny" / "tokenizer", "image")
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(tokenizer.train().encode(images)[:1], tokenizer.encode(images[:1]))


# The frozen file, damaged or forged.


def test_other_weights_are_refused_on_resume(copy, shards):
    """As when the file that a tower starts from was replaced; here, another seed of the weights."""
    config = change(copy[1], {"train__steps": STEPS + 1, "run__resume_allow": ["train.steps"]})
    with mock.patch("vqclip.train.main.derive_seed", return_value=1), pytest.raises(OtherRunError) as error:
        run(config)
    message = str(error.value)
    assert "frozen/model.safetensors: the run began with other weights" in message
    assert "model.image.tower, model.text.tower gives now" in message
    assert "Restore the file or package" in message


def rewritten(folder, forge):
    """Forge the frozen file with matching digests everywhere in it."""
    path = folder / "tiny" / "frozen" / "model.safetensors"
    state = load_file(path)
    forge(state)
    save_file(state, path)
    digest = digest_file(path).model_dump()
    for each in (folder / "tiny" / "checkpoints").iterdir():
        reseal(each / "model", lambda config: config.update(frozen=digest))


def nan(state):
    state[min(state)][:] = float("nan")


def doubled(state):
    state["logit_scale"] = torch.zeros(())


@pytest.mark.parametrize(
    ("forge", "message"),
    [(nan, "frozen/model.safetensors: .* contain NaN or infinity: .*; restore a"), (doubled, "twice: logit_scale")],
)
def test_a_forged_file_is_refused(copy, forge, message):
    folder, config = copy
    rewritten(folder, forge)
    with pytest.raises(CheckpointError, match=message):
        CLIP.from_pretrained(checkpoint(folder) / "model")
    if forge is nan:
        task = build(config).task
        frozen = FrozenWeights(folder / "tiny" / "frozen", task.model, task.towers)
        with pytest.raises(OtherRunError, match="began with other weights"):
            frozen.require_equal(checkpoint(folder) / "model")


def test_other_frozen_parts_are_refused_on_resume(copy, shards):
    folder, _ = copy
    shutil.rmtree(checkpoint(folder))
    config = tree(folder, shards, {"last": 1}, LORA, train__steps=STEPS, run__resume_allow=["model"])
    with pytest.raises(OtherRunError, match=r"other frozen parts.*model\.\*\.tower\.train cannot change"):
        run(config)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("how", ["missing", "other type", "one row that would be repeated"])
def test_a_forged_adapter_is_refused(copy, part, how):
    """Not left out of the merged weights, nor rounded to their type."""
    model = checkpoint(copy[0]) / "model"
    path = model / "model.safetensors"
    state = load_file(path)
    name = min(each for each in state if each.endswith(f"{part}.default.weight"))
    if how == "missing":
        del state[name]
    elif how == "other type":
        state[name] = state[name].to(torch.complex64)
    else:
        state[name] = state[name][:1].clone() if part == "lora_B" else state[name][:, :1].clone()
    save_file(state, path)
    reseal(model)
    with pytest.raises(CheckpointError, match="adapters do not fit their matrices"):
        CLIP.from_pretrained(model)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "frozen/model.safetensors: SHA-256 .* the file is damaged. .* restore a copy of it, or train under"),
        (Path.unlink, "frozen/model.safetensors: no such file; .* once for all its checkpoints. Restore"),
    ],
)
def test_a_damaged_file_is_refused(copy, damage, message):
    folder, config = copy
    damage(folder / "tiny" / "frozen" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        CLIP.from_pretrained(checkpoint(folder) / "model")
    with pytest.raises(CheckpointError, match=message):
        run(config)
    assert load(checkpoint(folder)).step == STEPS  # nothing was set aside or removed


def test_a_step_of_unfreezing_after_the_run_is_refused(tmp_path, shards):
    with pytest.raises(ValueError, match=r"model.text.tower.train.from_step: got 6, but the run has 6 steps"):
        TrainConfig.model_validate(tree(tmp_path, shards, text={"from_step": STEPS}))


# ---- Training steps of models whose towers are frozen, with the towers' features and without.


BOTH = ("image", "text")


def frozen_step(modalities=BOTH, quantizer=FSQ, drop_path=0.0, reduce=None, **compute):
    torch.manual_seed(0)
    changes = {"image__tower__args__drop_path_rate": drop_path}
    for name in modalities:
        changes |= {f"{name}__tower__train": "none", f"{name}__reduce": reduce}
    model = tiny_model(quantizer, quantizer, **changes).build()
    return model, contrastive_step(model, precision="fp32", **compute)


def with_features(batch: Batch, model, modalities) -> Batch:
    """The batch as it comes from the feature cache."""
    inputs = {"image": batch.images, "text": batch.texts}
    features = {name: getattr(model, name).tower_features(inputs[name]) for name in modalities}
    images = batch.images[:, :, :0, :0] if "image" in modalities else batch.images
    return dataclasses.replace(batch, images=images, features=features)


def train(modalities, cached, **changes):
    model, step = frozen_step(modalities, **changes)
    losses = []
    for number in range(3):
        batch = batch_number(number, model)
        batch = with_features(batch, model, cached) if cached else batch
        losses.append(step(batch, number).terms["total"])
    return {name: value.clone() for name, value in model.state_dict().items()}, torch.stack(losses)


def assert_equal(one, other):
    assert torch.equal(one[1], other[1])
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


@pytest.mark.parametrize(
    ("modalities", "changes"), [(BOTH, {"micro_batches": 3}), (("text",), {}), (BOTH, {"reduce": {"kind": "queries"}})]
)
def test_given_and_computed_features_train_the_same_bits(modalities, changes):
    """A reduction with weights works on stored features; `test_feature_cache.py` has one without."""
    changes = changes | {"quantizer": BUSY_RESIDUAL}
    computed = train(modalities, (), **changes)
    assert_equal(train(modalities, modalities, **changes), computed)
    model, _ = frozen_step(modalities, **changes)
    before = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], computed[0][name])}
    assert not any(name.startswith(tuple(f"{m}.tower" for m in modalities)) for name in moved)
    assert {"image.project_in.1.weight", "text.project_in.1.weight"} <= moved


@pytest.mark.slow
@pytest.mark.parametrize("modalities", [BOTH, ("image",)], ids="+".join)
def test_compiled_steps_take_features(modalities):
    computed = train(modalities, (), compile=True)
    assert_equal(train(modalities, modalities, compile=True), computed)
    assert torch.allclose(computed[1], train(modalities, ())[1], rtol=1e-4)


def test_a_frozen_tower_runs_once_for_all_microbatches_and_draws_nothing():
    model, step = frozen_step(micro_batches=3, drop_path=0.5)
    assert not towers_draw(model)
    with mock.patch.object(model.image.tower, "forward", wraps=model.image.tower.forward) as forward:
        step(batch_number(0, model), 0)
    assert forward.call_count == 1
    assert towers_draw(frozen_step(modalities=("text",), drop_path=0.5)[0])
