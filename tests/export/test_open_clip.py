"""Towers of vqclip models in open_clip models."""

from __future__ import annotations

import open_clip
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.models import tiny_model
from tests.open_clip_models import TRUNK, both_towers, save_open_clip
from vqclip.config import to_yaml
from vqclip.errors import ConfigError
from vqclip.export.open_clip import export_towers
from vqclip.model import ModelConfig
from vqclip.train import TrainConfig

main = command("export")

CAPTIONS = ["a cat", "two red dogs on a very long road", ""]


def embeddings(model, size):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 3, size, size, generator=generator)
    with torch.no_grad():
        return model.encode_image(pixels), model.encode_text(open_clip.get_tokenizer("ViT-B-32")(CAPTIONS, 12))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vqclip-back", {}),
        ("vqclip-back-custom", {"custom_text": True}),
        ("vqclip-back-trunk", {"vision_cfg": TRUNK, "init_logit_bias": -3.0}),
    ],
)
def test_towers_that_were_not_trained_give_the_original_embeddings(tmp_path, name, changes):
    theirs, weights = save_open_clip(tmp_path, name, **changes)
    ModelConfig.model_validate(both_towers(name, weights)).build().save_pretrained(tmp_path / "folder")
    _, found = export_towers(tmp_path / "folder", weights, tmp_path / "out")
    kept = {"text.text_projection", "logit_scale", *(("logit_bias",) if "trunk" in name else ())}
    assert set(found) - {"visual.proj", "visual.head.proj.weight"} == kept
    back, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    size = 224 if "trunk" in name else 32
    for mine, original in zip(embeddings(back.eval(), size), embeddings(theirs, size), strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=1e-5)
    assert back.logit_scale.item() == theirs.logit_scale.item()
    assert type(back) is type(theirs)
    assert preprocess(Image.new("RGB", (9, 7))).shape == (3, size, size)
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(CAPTIONS).shape == (3, 12)
    plain = open_clip.create_model(name, pretrained=str(tmp_path / "out" / "open_clip_model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), back.parameters(), strict=True))


def test_trained_towers_are_written_and_the_rest_is_kept(tmp_path):
    theirs, weights = save_open_clip(tmp_path, "vqclip-trained")
    model = ModelConfig.model_validate(both_towers("vqclip-trained", weights)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "folder")
    export_towers(tmp_path / "folder", weights, tmp_path / "out")
    back = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert torch.equal(back.visual.proj, theirs.visual.proj)
    assert torch.equal(back.token_embedding.weight, theirs.token_embedding.weight + 0.01)
    pixels = torch.rand(2, 3, 32, 32)
    features = back.eval().visual.forward_intermediates(
        model.image.tower.normalize(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
    )
    torch.testing.assert_close(features["image_intermediates"][-1], model.image.tower.eval()(pixels))


def test_the_command_finds_the_base_of_a_run(tmp_path, capsys):
    theirs, weights = save_open_clip(tmp_path, "vqclip-run")
    section = both_towers("vqclip-run", weights)
    model, run, out = ModelConfig.model_validate(section), tmp_path / "run", tmp_path / "out"
    model.build().save_pretrained(run / "tokenizer")
    assert main([str(run), "--open-clip", "--out", str(out)]) == 2
    assert "--base: got none, and no" in capsys.readouterr().err
    tree = {"data": {"sources": [{"kind": "shards", "path": "x"}]}, "loss": {"kind": "contrastive"}, "model": section}
    (run / "config.yaml").write_text(to_yaml(TrainConfig.model_validate(tree)))
    for folder in (run, run / "tokenizer"):
        assert main([str(folder), "--open-clip", "--out", str(out)]) == 0
        assert "3 of the base checkpoint (logit_scale, visual.proj, text.text_projection)" in capsys.readouterr().out
    back = open_clip.create_model(f"local-dir:{out}").eval()
    torch.testing.assert_close(embeddings(back, 32), embeddings(theirs, 32), rtol=0, atol=1e-5)


def test_options_that_do_not_go_together_are_refused(tmp_path, capsys):
    for arguments, message in [
        (["x", "--out", "o"], "--modality: got none"),
        (["x", "--out", "o", "--modality", "image", "--base", "b"], "--base: got it without --open-clip"),
        (["x", "--out", "o", "--modality", "image", "--open-clip"], "--modality: got it with --open-clip"),
        (["x", "--out", "o", "--compare-only", "--open-clip"], "--compare-only: got it with --open-clip"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_what_open_clip_cannot_hold_is_refused(tmp_path):
    _, weights = save_open_clip(tmp_path, "vqclip-held")
    tiny_model().build().save_pretrained(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"got the towers timm and transformer; expected both of one open_clip model"):
        export_towers(tmp_path / "tiny", weights, tmp_path / "out")
    ModelConfig.model_validate(both_towers("vqclip-held", weights)).build().save_pretrained(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"^--base: got 'gone', which is neither a file nor one of the tags"):
        export_towers(tmp_path / "folder", "gone", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="would be replaced, and contains no open_clip_config.json but thesis.txt"):
        export_towers(tmp_path / "folder", weights, tmp_path / "mine")
    assert not (tmp_path / "out").exists()
