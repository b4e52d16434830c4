"""Training, resuming, evaluating and tokenizing with towers of transformers."""

import json
import shutil

import pytest
import torch

from tests.models import change
from tests.towers.transformers_models import make_image, make_text
from tests.training import run, run_tree
from vqclip import checkpoint, load_tokenizer
from vqclip.data.tokens.shards import TokenRecord
from vqclip.errors import OtherRunError
from vqclip.model import CLIP
from vqclip.tokenize_dataset.job import encode_captions

HALF = 6
ALL = 12


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    make_image(folder / "image", "vit")
    make_text(folder / "text")
    return folder


def tree_of(folder, shards, towers, **changes):
    tree = run_tree(folder, shards, train__steps=ALL, **changes)
    for part in ("image", "text"):
        tower = {"kind": "transformers", "name": str(towers / part)}
        tree["model"][part]["tower"] = tower | ({"context_length": 12} if part == "text" else {})
    return tree


CHANGES = {
    "image/config.json": ({"hidden_act": "relu"}, r"image\.tower.*\.network\.hidden_act: 'gelu' in"),
    "image/preprocessor_config.json": ({"image_mean": [0.1] * 3}, r"image\.tower.*\.mean\[0\]: 0\.5"),
    "text/tokenizer.json": ({"model__vocab__a": 13}, r"text\.tower.*\.tokenizer\.json: '\w{64}'"),
}


def test_a_run_whose_towers_have_other_settings_in_their_folders_does_not_resume(tmp_path, shards, towers):
    own = shutil.copytree(towers, tmp_path / "towers")
    tree = tree_of(tmp_path / "run", shards, own, train__checkpoint_every=HALF)
    run(tree)
    shutil.rmtree(tmp_path / "run" / "tiny" / "checkpoints" / f"step-{ALL:08d}")
    for name, (changes, message) in CHANGES.items():
        before = (own / name).read_text()
        (own / name).write_text(json.dumps(change(json.loads(before), changes)))
        with pytest.raises(OtherRunError, match=message):
            run(tree)
        (own / name).write_text(before)
    run(tree)


@pytest.mark.parametrize("train", ["all", {"lora": {"rank": 2}}], ids=["all", "lora"])
def test_checkpoints_and_exports_need_no_folder_of_the_towers(tmp_path, shards, towers, train):
    """Whether the weights of towers are in a checkpoint, or in it and beside it."""
    own = shutil.copytree(towers, tmp_path / "towers")
    tree = tree_of(tmp_path / "run", shards, own)
    for part in ("image", "text"):
        tree["model"][part]["tower"]["train"] = train
    run(tree)
    shutil.rmtree(own)
    folder = tmp_path / "run" / "tiny"
    text = load_tokenizer(folder / "tokenizer", "text")
    newest = checkpoint.checkpoints(folder / "checkpoints")[-1]
    model = CLIP.from_pretrained(checkpoint.load(newest).model_folder).float()
    captions = ["a red star", "two", ""]
    ids = text.float().encode(captions)
    assert torch.equal(ids, model.text.encode(captions))
    records = [TokenRecord("", number, -1, (each,), None, None) for number, each in enumerate(captions)]
    found, _ = encode_captions(text, records, 2, "fp32")
    assert [len(each.texts[0]) for each in found] == [5, 3, 2]
    assert found[0].texts[0].tolist() == ids[0, :5].tolist()
