import math
from unittest import mock

import pytest
import torch

import vqclip
from tests.models import FSQ, LFQ, PRODUCT, built, tiny_model
from tests.tokenizer.test_folder import edited
from vqclip.errors import ConfigError
from vqclip.io.atomic import digest_file
from vqclip.model import CLIP, ImageModel, ModelConfig, load_pretrained
from vqclip.tokenizer.folder import TokenizerFolder


@pytest.fixture
def saved(tmp_path):
    model = built(FSQ, LFQ, temperature={"bias": -10.0}).eval()
    model.save_pretrained(tmp_path / "tokenizer")
    return model, tmp_path / "tokenizer"


def test_a_folder_of_images_or_of_both_is_verified_once(saved, tmp_path, monkeypatch):
    model, folder = saved
    model.image.save_pretrained(tmp_path / "image")
    opened, verify = [], TokenizerFolder.open
    monkeypatch.setattr(TokenizerFolder, "open", lambda path: opened.append(path) or verify(path))
    assert isinstance(load_pretrained(folder), CLIP)
    assert isinstance(load_pretrained(tmp_path / "image"), ImageModel)
    assert opened == [folder, tmp_path / "image"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_loaded_without_gradients_can_be_used_with_them(saved, context):
    model, folder = saved
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with context():
        image = vqclip.load_tokenizer(folder, modality="image")
        text = vqclip.load_tokenizer(folder, modality="text")
        whole = CLIP.from_pretrained(folder)
        assert torch.equal(image.encode(images), model.image.encode(images))
    both = ((image, images), (text, text.preprocess(["a red star"])), (whole.image, images))
    for tokenizer, inputs in both:
        assert tokenizer.embed(tokenizer(inputs).ids).numpy().shape == (len(inputs), 16)  # it carries no gradient
        tokenizer.requires_grad_()(inputs).embedding[:, 0].sum().backward()
        assert [n for n, p in tokenizer.project_in.named_parameters() if p.grad is None] == []


def test_errors_of_towers_name_the_key_that_was_written():
    parts = {"quantizer": FSQ, "width": 16, "heads": 2}
    both = ModelConfig.model_validate({"towers": {"model": "ViT-B-61"}, "image": parts, "text": parts})
    with pytest.raises(ConfigError, match=r"^model\.towers\.model: open_clip has no model 'ViT-B-61'"):
        both.build()
    tree = tiny_model().model_dump()
    tree["image"]["tower"]["name"] = "vit_tini"
    with pytest.raises(ConfigError, match=r"^model\.image\.tower\.name: timm has no model 'vit_tini'"):
        ModelConfig.model_validate(tree).build()
    tree = tiny_model().model_dump()
    tree["text"]["tower"] = {"kind": "open_clip", "model": "ViT-B-61"}
    with pytest.raises(ConfigError, match=r"^model\.text\.tower\.model: "):
        ModelConfig.model_validate(tree).build()


@pytest.mark.parametrize(
    ("section", "key", "most"),
    [
        ((), "embed_dim", 2**16),
        (("image",), "width", 2**16),
        (("text",), "depth", 2**10),
        (("text", "tower"), "width", 2**16),
        (("text", "tower"), "layers", 2**10),
        (("image", "quantizer"), "codebooks", 2**16),
    ],
)
def test_models_of_absurd_sizes_are_refused(section, key, most):
    """Before memory is taken for them."""
    tree = tiny_model(PRODUCT).model_dump()
    part = tree
    for name in section:
        part = part[name]
    part[key] = most + 1
    with pytest.raises(ValueError, match=rf"{key}\n.*less than or equal to {most} "):
        ModelConfig.model_validate(tree)


def test_the_temperature_is_held_below_its_maximum():
    model = tiny_model(temperature={"init": 10.0, "max": 20.0}).build()
    with torch.no_grad():
        model.logit_scale.fill_(math.log(50.0))
    model.clamp_temperature()
    assert model.logit_scale.exp().item() == pytest.approx(20.0)
    with pytest.raises(ValueError, match="expected init <= max"):
        tiny_model(temperature={"init": 200.0})


class Opened(Exception):
    pass


@pytest.mark.parametrize("weights", [{"checkpoint": "evil.pt"}, {"pretrained": True}])
def test_loading_opens_no_other_weights(saved, monkeypatch, weights):
    """Whoever wrote config.json may name any file there; none but the folder's own is opened."""
    model, folder = saved
    edited(lambda c: c["image"]["tower"].update(weights))(folder)

    def refuse(*arguments, **options):
        raise Opened

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("timm.models._builder.load_pretrained", refuse)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    for loaded in (vqclip.load_tokenizer(folder, modality="image"), CLIP.from_pretrained(folder).image):
        assert torch.equal(loaded.encode(images), model.image.encode(images))
        assert loaded.config.tower.checkpoint is None
        assert loaded.config == model.image.config.architecture()


def test_one_entry_names_both_towers():
    parts = {"quantizer": FSQ, "width": 16, "heads": 2}
    towers = {"kind": "open_clip", "model": "ViT-B-16", "pretrained": "laion2b_s34b_b88k"}
    config = ModelConfig.model_validate({"towers": towers, "image": parts, "text": parts})
    assert config.image.tower.model_dump() == config.text.tower.model_dump() == towers | {"train": "all"}
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    other = {"kind": "open_clip", "model": "ViT-B-32"}
    with pytest.raises(ValueError, match=r"got both towers and text.tower, which differ"):
        ModelConfig.model_validate({"towers": towers, "image": parts, "text": parts | {"tower": other}})
    frozen_image = parts | {"tower": {"train": "none"}}
    frozen = ModelConfig.model_validate({"towers": towers, "image": frozen_image, "text": parts})
    assert (frozen.image.tower.train, frozen.text.tower.train) == ("none", "all")
    assert ModelConfig.model_validate(frozen.model_dump(mode="json")) == frozen


def contents(folder):
    return {path.name: digest_file(path) for path in folder.iterdir()}


def test_saving_drops_nothing_without_a_word(saved, tmp_path, monkeypatch):
    """One modality over both, over another model, and over a tokenizer that lies beside something else."""
    model, folder = saved
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "clip"}')
    beside = tmp_path / "beside"
    model.image.save_pretrained(beside)
    (beside / "notes.txt").write_text("mine")
    for place, message in (
        (folder, r"tokenizer of modality 'text'.*name another folder, or save both.*CLIP\.save_pretrained"),
        (foreign, r"another model's config\.json"),
        (beside, r"contains notes\.txt beside a tokenizer"),
    ):
        before = contents(place)
        with pytest.raises(ConfigError, match=message):
            model.image.save_pretrained(place)
        assert contents(place) == before
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="is the working folder"):
        model.save_pretrained(".")


def test_a_tokenizer_is_replaced_whole_or_not_at_all(saved, tmp_path):
    model, _ = saved
    folder = tmp_path / "image"
    model.image.save_pretrained(folder)
    (folder / "README.md").write_text("the card of the former one")
    before = contents(folder)
    full = mock.patch("vqclip.tokenizer.saving.write_config", side_effect=OSError("No space left"))
    with full, pytest.raises(OSError, match="No space left"):
        model.image.save_pretrained(folder)
    assert contents(folder) == before
    link = tmp_path / "link"
    link.symlink_to(folder)
    model.save_pretrained(link)  # both in place of one
    assert link.is_symlink()
    assert sorted(contents(folder)) == ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert "the former one" not in (folder / "README.md").read_text()
    whole = CLIP.from_pretrained(folder)
    assert torch.equal(torch.stack(whole.temperature()), torch.stack(model.temperature()))
    assert not whole.training
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_home_folder_is_spelt_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    built = tiny_model().build()
    built.save_pretrained("~/mine")
    assert (tmp_path / "mine" / "config.json").is_file()
    assert vqclip.load_tokenizer("~/mine", modality="image").num_tokens == built.image.num_tokens
