"""`task: pixels`: a pixel decoder for a frozen, exported tokenizer."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.models import BUSY_RESIDUAL, FSQ, IDENTITY, PRODUCT, change, tiny_model
from tests.ranks import for_each
from tests.test_world_size import ENTROPY_LFQ
from tests.training import all_equal, averages, largest_difference, metrics, run, run_tree, run_until, weights
from vqclip import dist, load_tokenizer
from vqclip.cli.main import main
from vqclip.errors import CheckpointError, ConfigError, OtherRunError
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.stored import fingerprint
from vqclip.train import run as train
from vqclip.train.export import load_model
from vqclip.train.tasks.kinds import load_task_config

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 6
ADVERSARIAL = {"kind": "adversarial", "start_step": 2, "discriminator": {"kind": "patch", "channels": 16, "layers": 1}}
DECODER = {"kind": "transformer", "width": 8, "heads": 2, "depth": 1, "channels": 3}
LOSSES = [{"kind": "l1"}, {"kind": "l2", "weight": 0.5}, ADVERSARIAL]
DETAIL = {"quantizer": {"kind": "vq", "dim": 4, "codebook_size": 8}, "stages": 2, "channels": 8, "max_channels": 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tokenizer") / "both"
    tiny_model(PRODUCT, FSQ).build().eval().save_pretrained(folder)
    return folder


def pixel_tree(folder, shards, tokenizer, **changes):
    tree = run_tree(folder, shards)
    for key in ("model", "loss"):
        del tree[key]
    tree |= {"task": "pixels", "tokenizer": str(tokenizer), "losses": LOSSES}
    tree["decoder"] = DECODER
    tree["train"] |= {"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 9, "ema": {"decay": 0.5}}
    return change(tree, changes)


def saved(folder, step=STEPS):
    """Every tensor of a checkpoint: the decoder, discriminators, averages and the optimizer's state."""
    path = folder / "tiny" / "checkpoints" / f"step-{step:08d}"
    model = {f"model/{name}": each for name, each in weights(folder, step).items()}
    files = ("state.safetensors", "optimizer.safetensors")
    return model | {f"{name}/{key}": each for name in files for key, each in load_file(path / name).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, tokenizer):
    folder = tmp_path_factory.mktemp("whole")
    tree = pixel_tree(folder, shards, tokenizer, train__precision="fp32", detail=DETAIL)
    run(tree, str(folder / "cache"))
    return folder, tree


def test_the_export_is_the_tokenizer_with_a_decoder(whole, tokenizer):
    folder, _ = whole
    before, after = (load_tokenizer(path, "image") for path in (tokenizer, folder / "tiny" / "tokenizer"))
    assert fingerprint(after) == fingerprint(before)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    assert after.encode(images).equal(before.encode(images))
    assert after.decode_pixels(after.encode_pixels(images)).shape == (3, 3, 16, 16)
    assert before.pixels is None
    exported = load_file(folder / "tiny" / "tokenizer" / "pixels.safetensors")
    assert (averaged := averages(folder, STEPS))
    assert all(exported[name].equal(each) for name, each in averaged.items())
    whole = load_file(folder / "tiny" / "tokenizer" / "model.safetensors")
    assert whole.keys() == CLIP.from_pretrained(tokenizer).state_dict().keys()


def test_checkpoints_hold_the_decoder_alone(whole):
    folder, _ = whole
    assert all(name.startswith("image.pixels.") for name in weights(folder, STEPS))
    assert any("discriminators/" in name for name in saved(folder))
    described = json.loads((folder / "tiny" / "checkpoints" / "step-00000006" / "model" / "pixels.json").read_text())
    assert described.keys() == {"tokenizer", "pixels"}


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, whole):
    folder, tree = whole
    tree = tree | {"run": tree["run"] | {"folder": str(tmp_path)}}
    run_until(3, tree)
    assert len(run(tree)["sample_ids"]) == STEPS - 2
    assert all_equal(saved(tmp_path), saved(folder))


@pytest.mark.parametrize(
    ("quantizer", "processes", "micro_batches"),
    [
        (BUSY_RESIDUAL, 2, 2),
        pytest.param(BUSY_RESIDUAL, 3, 1, marks=pytest.mark.slow),
        pytest.param(ENTROPY_LFQ, 1, 3, marks=pytest.mark.slow),
    ],
)
def test_processes_give_the_same_trajectory(tmp_path, shards, tokenizer, ranks, quantizer, processes, micro_batches):
    changes = {"detail": DETAIL | {"quantizer": quantizer}}
    run(pixel_tree(tmp_path / "one", shards, tokenizer, **changes))
    more = pixel_tree(tmp_path / "more", shards, tokenizer, train__micro_batches=micro_batches, **changes)
    ranks(processes, run, more)
    one, more = saved(tmp_path / "one"), saved(tmp_path / "more")
    assert largest_difference(one, more) < 1e-9
    before = saved(tmp_path / "one", 2)
    ends = ("branch.layers.1.weight", "branch.patches.1.weight", "quantizer.layer.layers.0.codebook")
    ends = tuple(f"detail.{end}" for end in ends)
    trained = [name for name in one if name.startswith("model/") and name.endswith(ends)]
    assert len(trained) == (3 if quantizer == BUSY_RESIDUAL else 2), [*one]
    assert not any(one[name].equal(before[name]) for name in trained)
    for line, also in zip(metrics(tmp_path / "one"), metrics(tmp_path / "more"), strict=True):
        assert ("loss/detail/token_entropy" in line) == (quantizer == ENTROPY_LFQ)
        for name in ("loss/total", "grad_norm", "pixels/mse"):
            assert line[name] == pytest.approx(also[name], rel=1e-9)


def test_stored_ids_train_the_same_bits(tmp_path, shards, tokenizer):
    """Two views of each image; the tokenizer is not run in a step."""
    settings = {"data__views": 2, "train__precision": "fp32"}
    for name, stored in (("computed", None), ("stored", {"folder": str(tmp_path / "features")})):
        tree = pixel_tree(tmp_path / name, shards, tokenizer, data__feature_cache=stored, **settings)
        with mock.patch.object(ImageTokenizer, "encode", autospec=True, side_effect=ImageTokenizer.encode) as encode:
            run(tree)
        # Chunks of one shape, so that ids do not depend on the batch: 12 samples a step and to count the FLOPs, or 30
        # samples x 2 views.
        calls = [len(images) for (_, images), _ in encode.call_args_list]
        assert calls == [16] * (STEPS + 1 if stored is None else 4)
    assert all_equal(saved(tmp_path / "computed"), saved(tmp_path / "stored"))


def test_a_changed_tokenizer_is_another_run(tmp_path, shards, tokenizer):
    changed = tmp_path / "changed"
    model = CLIP.from_pretrained(tokenizer)
    model.save_pretrained(changed)
    tree = pixel_tree(tmp_path, shards, changed, train__steps=4)
    run(tree)
    next(model.image.project_in.parameters()).data += 1
    model.save_pretrained(changed)
    tree["train"]["steps"], tree["run"]["resume_allow"] = 6, ["train.steps"]
    with pytest.raises(OtherRunError, match="tokenizer: '.*' in the checkpoint"):
        run(tree)


def test_a_tokenizer_of_images_alone(tmp_path, shards, tokenizer):
    load_tokenizer(tokenizer, "image").save_pretrained(tmp_path / "image")
    tree = pixel_tree(tmp_path, shards, tmp_path / "image", train__steps=4)
    result = train(load_task_config(tree))
    assert load_tokenizer(result.tokenizer, "image").pixels is not None
    for place in (result.tokenizer, tmp_path / "tiny" / "checkpoints" / "step-00000004"):
        assert load_model(str(place), images_alone=True).model.image.pixels is not None
        with pytest.raises(CheckpointError, match="contains image tokenizer; expected one of modality 'text' too"):
            load_model(str(place))
    tree["evaluation"] = [{"kind": "retrieval", "data": {"kind": "shards", "path": str(shards)}}]
    with pytest.raises(ConfigError, match=r"evaluation\[0\]: got kind retrieval for a tokenizer of images alone"):
        train(load_task_config(tree))
    tree["decoder"]["stages"] = 2
    with pytest.raises(ConfigError, match=r"^decoder\.stages: got 2 for "):
        train(load_task_config(tree))


def error_of_tokenizers(tree, folders):
    """The error of a rank that finds its own folder under the name of the tokenizer."""
    config = load_task_config(tree | {"tokenizer": folders[dist.rank()]})
    try:
        config.build_task(torch.device("cpu"))
    except (ConfigError, CheckpointError) as error:
        return str(error)


def test_ranks_with_other_tokenizers_are_refused(tmp_path, shards, tokenizer, ranks):
    found = [str(tokenizer), *(str(tmp_path / modality) for modality in ("image", "text")), "no/such/folder"]
    for modality in ("image", "text"):
        model = CLIP.from_pretrained(tokenizer)
        next(getattr(model, modality).project_in.parameters()).data += 1
        model.save_pretrained(tmp_path / modality)
    tree = pixel_tree(tmp_path, shards, tokenizer)
    jobs = [(tree, [str(tokenizer), other]) for other in found]
    for good, *others, missing in ranks(2, for_each, error_of_tokenizers, jobs):
        assert good is None
        for message in others:
            told = "rank 1 loaded another tokenizer than rank 0; expected the same files, byte for byte"
            assert re.match(f"tokenizer: .*{told}, on every machine$", message)
        assert missing.startswith("tokenizer: no/such/folder: no such folder; expected")


REFUSED = {
    "a key of the other task": ({"model": {}}, "model: unknown key; expected one of run, data"),
    "an unknown task": ({"task": "video"}, "task: got 'video'; expected one of contrastive, pixels"),
    "no tokenizer": ({"tokenizer": "a/b/c"}, "tokenizer: a/b/c: no such folder; expected .*; a run with .* exports"),
    "texts alone": ({"tokenizer": "TEXT"}, "tokenizer: .*: contains text tokenizer; expected one of modality 'image'$"),
    "no grid": (
        {"tokenizer": "QUERIES"},
        "tokenizer: .*: pixels: got 3 tokens for images of 16 x 16 .*; expected a square",
    ),
    "no losses": ({"losses": []}, "losses: got no term"),
    "a cache without views": ({"data__feature_cache": {}}, "data.views: got null"),
    "a cache of texts": (
        {"data__feature_cache": {"modalities": ["text"]}, "data__views": 1},
        r"data.feature_cache.modalities: got \['text'\]; expected \[image\]",
    ),
    "a bottleneck": ({"train__bottleneck": {"open_steps": 1, "close_steps": 0}}, "train.bottleneck: got a schedule"),
    "recomputed activations": ({"train__activation_checkpointing": True}, "train.activation_checkpointing: got true"),
    "compiled regions": ({"train__compile": "regional"}, "train.compile: got regional"),
    "no codes": ({"tokenizer": "IDENTITY"}, "has no codes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name, tmp_path, shards, tokenizer):
    changes, message = dict(REFUSED[name][0]), REFUSED[name][1]
    place, kind = tmp_path / "made", changes.pop("tokenizer", str(tokenizer))
    if kind == "IDENTITY":
        tiny_model(IDENTITY, FSQ).build().save_pretrained(place)
    elif kind == "TEXT":
        load_tokenizer(tokenizer, "text").save_pretrained(place)
    elif kind == "QUERIES":
        image = tiny_model(PRODUCT, FSQ).image.model_dump() | {"reduce": {"kind": "queries", "count": 3}}
        tiny_model(PRODUCT, FSQ, image=image).build().save_pretrained(place)
    tree = pixel_tree(tmp_path, shards, place if place.exists() else kind, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train(tree)


def test_a_checkpoint_is_exported(whole, tmp_path):
    folder, _ = whole
    assert main(["export-tokenizer", str(folder / "tiny"), "--step", "4", "--out", str(tmp_path / "out")]) == 0
    assert load_tokenizer(tmp_path / "out", "image").pixels is not None
    assert load_model(str(folder / "tiny")).model.image.pixels is not None
    newest = load_model(str(folder / "tiny" / "checkpoints" / "step-00000004"), "current")
    pixels = {name: each for name, each in newest.model.state_dict().items() if name.startswith("image.pixels.")}
    assert all_equal(pixels, weights(folder, 4))


@pytest.mark.slow
def test_the_configuration_that_we_ship_trains(tmp_path):
    base = load_task_config(CONFIGS / "base.yaml")
    base.model.build().save_pretrained(tmp_path / "tokenizer")
    data = {"kind": "scenes", "drawing": {"train": 40, "val": 8, "test": 16, "heldout": 8}}
    changes = [
        f"tokenizer={tmp_path / 'tokenizer'}",
        f"run.folder={tmp_path}",
        f"data.sources=[{json.dumps(data)}]",
        f"evaluation[0].data={json.dumps(data | {'split': 'test'})}",
        *("train.steps=3", "train.batch_size=8", "optim.warmup_steps=1"),
    ]
    result = train(load_task_config(CONFIGS / "pixels.yaml", changes))
    assert result.results[0].kind == "pixels"
    assert load_tokenizer(result.tokenizer, "image", encode=False).pixels is not None
