import copy
import json
import shutil

import pytest
import torch
from transformers import BartConfig, BartModel, CLIPConfig, CLIPModel, GPT2Config, GPT2Model, ViTMAEConfig, ViTMAEModel

from tests.towers.transformers_models import (
    CAPTIONS,
    IMAGES,
    TEXT,
    TEXTS,
    VISION,
    make_image,
    make_network,
    make_text,
    save,
    word_pieces,
)
from vqclip.errors import ConfigError
from vqclip.towers.transformers import TransformersImageTowerConfig, TransformersTextTowerConfig


def config(folder, **settings):
    return TransformersTextTowerConfig(name=str(folder), **{"context_length": 12} | settings)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, make_text(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_features_of_tokens_are_those_of_transformers(name, tmp_path):
    theirs = make_text(tmp_path, name)
    theirs = {"t5": lambda: theirs.get_encoder(), "bert_for_masked_lm": lambda: theirs.bert}.get(name, lambda: theirs)()
    tower = config(tmp_path).build().eval()
    tokens = tower.vocabulary(CAPTIONS)
    real = tower.mask(tokens)
    with torch.no_grad():
        features = tower(tokens)
        numbers = torch.where(real, tokens, tower.pad)
        expected = theirs(input_ids=numbers, attention_mask=real.long()).last_hidden_state
    assert features.shape == (4, 12, 16)
    torch.testing.assert_close(features[real], expected[real], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "roberta", "clip", "t5_encoder"])
def test_a_caption_does_not_depend_on_the_others(name, tmp_path):
    """Not on their padding either: transformers leaves out a mask without padding, which changes the kernel."""
    make_text(tmp_path, name)
    tower = config(tmp_path).build().eval()
    full = tower.vocabulary(["a " * 40, "two " * 40])
    mixed = torch.cat([full[:1], tower.vocabulary(["a star"])])
    with torch.no_grad():
        assert torch.equal(tower(full)[0], tower(mixed)[0])
        short = tower(mixed[1:, :6])
        torch.testing.assert_close(tower(mixed)[1:, :4], short[:, :4])
        assert tower(full[:0]).shape == (0, 12, 16)
        nothing = tower(torch.full((1, 12), -1))
        assert nothing.isfinite().all()


def test_the_network_never_sees_a_mask_without_padding(bert, monkeypatch):
    """It would leave it out, and fused attention without a mask is another kernel on a GPU."""
    tower = config(bert[0]).build().eval()
    seen = []
    forward = tower.transformer.forward
    monkeypatch.setattr(tower.transformer, "forward", lambda **given: seen.append(given) or forward(**given))
    full = tower.vocabulary(["a " * 40])
    assert tower(full).shape == (1, 12, 16)
    assert seen[0]["attention_mask"].tolist() == [[1] * 12 + [0]]
    assert seen[0]["input_ids"].shape == (1, 13)


def test_every_trained_weight_gets_a_gradient_and_dropout_is_left_out_unless_asked_for(bert):
    tower = config(bert[0]).build()
    assert tower.training
    frozen = [name for name, weight in tower.named_parameters() if not weight.requires_grad]
    assert frozen == ["transformer.pooler.dense.weight", "transformer.pooler.dense.bias"]
    assert list(tower.unused) == frozen
    tokens = tower.vocabulary(CAPTIONS)
    tower(tokens).sum().backward()
    assert all(weight.grad is not None for weight in tower.parameters() if weight.requires_grad)
    assert torch.equal(tower(tokens), tower.eval()(tokens))
    drops = config(bert[0], dropout=True).build()
    assert not torch.equal(drops(tokens), drops(tokens))


@pytest.mark.slow
def test_it_compiles_without_a_break(bert):
    tower = config(bert[0], train="none").build().eval()
    tokens = tower.vocabulary(CAPTIONS)
    compiled = torch.compile(lambda x: (tower(x), tower.mask(x)), fullgraph=True, backend="eager")
    features, mask = compiled(tokens)
    torch.testing.assert_close(features, tower(tokens))
    assert torch.equal(mask, tower.mask(tokens))


def test_folders_of_sentence_transformers(bert, tmp_path):
    shutil.copytree(bert[0], tmp_path / "0_Transformer")
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    tower = config(tmp_path, context_length=None).build().eval()
    assert tower.context_length == 9
    tokens = tower.vocabulary(CAPTIONS)
    torch.testing.assert_close(tower(tokens), config(bert[0], context_length=9).build().eval()(tokens))

    with pytest.raises(ConfigError, match=r"tower.context_length: the network cannot read 77 tokens"):
        config(bert[0], context_length=None).build()


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def lose(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def large_vocabulary(folder):
    tokenizer = word_pieces()
    tokenizer.add_tokens([f"new{n}" for n in range(50)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose("config.json"), "expected config.json, model.safetensors and, for text, tokenizer.json; got:.*model.saf"),
        (lose("model.safetensors"), "contains no model.safetensors, but config.json"),
        (lose("tokenizer.json"), "contains no tokenizer.json of at most .* bytes, the file of a fast tokenizer"),
        (pickle_only, "no model.safetensors, but .*pytorch_model.bin.*; pickled weights are never opened"),
        (write("adapter_config.json", "{}"), "contains adapters"),
        (write("sentence_bert_config.json", "[9]"), "sentence_bert_config.json: contains a list"),
        (lambda f: change(f, layers=[{"depth": 10**6}]), "depth: got 1000000; expected at most 1024"),
        (write("model.safetensors", "x" * 100), "transformers cannot make this model of type 'bert'"),
        (lambda f: change(f, model_type="nonsense"), "has no model type 'nonsense'.*own code is never executed"),
        (lambda f: change(f, is_decoder=True), "which is no encoder of text"),
        (lambda f: change(f, quantization_config={"a": 1}), "has quantization_config"),
        (lambda f: change(f, model_type="timm_wrapper", architecture="hf-hub:a/b"), "has architecture, .*kind: timm"),
        (lambda f: change(f, hidden_size=20), "do not fit: embeddings.LayerNorm.bias: got shape"),
        (lambda f: change(f, num_hidden_layers=3), "the weights lack encoder.layer.2"),
        (large_vocabulary, "tokenizer.json has 115 tokens, the network 90"),
    ],
)
def test_damaged_or_foreign_folders_are_refused(damage, message, bert, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(bert[0], folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        config(folder).build()


def test_a_models_own_code_is_never_executed(bert, tmp_path, caplog):
    folder, marker = tmp_path / "copy", tmp_path / "executed"
    shutil.copytree(bert[0], folder)
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    code = {"auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    change(folder, **code)
    tokens = torch.tensor([[2, 7, 3]])
    assert torch.equal(config(folder).build().eval()(tokens), config(bert[0]).build().eval()(tokens))
    assert "names Python code of the model's own (auto_map), which is never executed" in caplog.text
    change(folder, **code, model_type="own")
    with pytest.raises(ConfigError, match="has no model type 'own'.*own code is never executed"):
        config(folder).build()
    assert not marker.exists()


def test_what_is_no_text_encoder_is_refused(tmp_path):
    gpt = GPT2Model(GPT2Config(vocab_size=90, n_embd=16, n_layer=1, n_head=2))
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    bart = BartModel(BartConfig(vocab_size=90, d_model=16, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes))
    for name, model, message in (("gpt", gpt, "'gpt2', which is no encoder"), ("bart", bart, "an encoder-decoder")):
        save(model, tmp_path / name)
        word_pieces().save(str(tmp_path / name / "tokenizer.json"))
        with pytest.raises(ConfigError, match=message):
            config(tmp_path / name).build()
    make_image(tmp_path / "vit")
    word_pieces().save(str(tmp_path / "vit" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no encoder of text; expected an encoder of text with an attention mask"):
        config(tmp_path / "vit").build()


def test_wrong_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"tower.name: .*missing: no such folder; expected a folder"):
        config(tmp_path / "missing").build()
    with pytest.raises(ConfigError, match="nobody/nothing: neither a local folder nor a model on the hub"):
        config("nobody/nothing").build()
    with pytest.raises(ConfigError, match="got revision 'main' of a local folder"):
        config(tmp_path, revision="main").build()
    for settings, message in (
        ({}, "got no name; expected one: name, or package"),
        ({"name": "a", "package": "minilm-l6"}, "got name and package; expected one"),
        ({"network": {}}, "got network with pretrained true"),
        ({"name": "a", "context_length": 2}, "greater than or equal to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformersTextTowerConfig(**settings)
    with pytest.raises(ConfigError, match="got it without a folder's tokenizer.json"):
        TransformersTextTowerConfig(network={"model_type": "bert"}, pretrained=False).build()


def test_half_precision_becomes_fp32_and_nan_is_refused(bert, tmp_path):
    shutil.copytree(bert[0], tmp_path / "other")
    other = save(copy.deepcopy(bert[1]).half(), tmp_path / "other")
    assert {weight.dtype for weight in config(tmp_path / "other").build().parameters()} == {torch.float32}
    other.encoder.layer[0].output.dense.bias.data[0] = float("nan")
    save(other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"encoder.layer.0.output.dense.bias: contains NaN"):
        config(tmp_path / "other").build()


def image_config(folder, **settings):
    return TransformersImageTowerConfig(name=str(folder), **settings)


def expected_features(network, pixels, tokens, **arguments):
    out = network((pixels - 0.5) / 0.25, **arguments).last_hidden_state
    return out.flatten(2).transpose(1, 2) if out.ndim == 4 else out[:, -tokens:]


@pytest.mark.parametrize("name", IMAGES)
def test_features_of_patches_are_those_of_transformers(name, tmp_path):
    theirs, tokens = make_image(tmp_path, name), 1 if name == "convnext" else 16
    tower = image_config(tmp_path, image_size=32 if name == "convnext" else None).build()
    assert (tower.image_size, tower.num_tokens) == (32, tokens)
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(tower.eval()(pixels), expected_features(theirs, pixels, tokens))
        assert tower(pixels[:0]).shape == (0, tokens, tower.width)
    tower.train()(pixels).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip", "clip"])
def test_positions_are_interpolated_for_another_size(name, tmp_path):
    theirs = make_image(tmp_path, name)
    tower = image_config(tmp_path, image_size=48).build().eval()
    assert tower.num_tokens == 36
    pixels = torch.rand(2, 3, 48, 48)
    arguments = {} if name == "dinov2" else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        assert torch.equal(tower(pixels), expected_features(theirs, pixels, 36, **arguments))


def test_wrong_image_sizes_are_refused(tmp_path):
    make_image(tmp_path / "vit")
    with pytest.raises(ConfigError, match=r"tower.image_size: got 30 with patches of 8.*last 6 rows.*multiple of 8"):
        image_config(tmp_path / "vit", image_size=30).build()
    make_image(tmp_path / "convnext", "convnext")
    with pytest.raises(ConfigError, match=r"tower.image_size: the network cannot read images of 16 pixels"):
        image_config(tmp_path / "convnext", image_size=16).build()


def test_both_halves_of_clip(tmp_path):
    torch.manual_seed(0)
    theirs = save(CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT)).eval(), tmp_path)
    word_pieces().save(str(tmp_path / "tokenizer.json"))
    image = image_config(tmp_path, mean=[0.5] * 3, std=[0.25] * 3).build().eval()
    text = TransformersTextTowerConfig(name=str(tmp_path), context_length=12).build().eval()
    pixels, tokens = torch.rand(2, 3, 32, 32), text.vocabulary(["a red star", "two"])
    with torch.no_grad():
        expected = expected_features(theirs.vision_model, pixels, 16)
        torch.testing.assert_close(image(pixels), expected)
        numbers = tokens.clamp_min(0)
        real = text.mask(tokens)
        torch.testing.assert_close(text(tokens)[real], theirs.text_model(numbers).last_hidden_state[real])


def test_normalisation_is_the_models_or_ones_own(tmp_path):
    make_image(tmp_path, mean=0.4)
    assert image_config(tmp_path).build().normalize.mean.flatten().tolist() == pytest.approx([0.4] * 3)
    assert image_config(tmp_path, mean=[0.1, 0.2, 0.3]).resolve().mean == (0.1, 0.2, 0.3)
    path = tmp_path / "preprocessor_config.json"
    good = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for settings, message in (
        ({"image_mean": [0.5]}, r"has .*'image_mean': \[0.5\],.* expected pixels scaled by 1/255, and image_mean and"),
        ({"image_std": [0, 1, 1]}, r"'image_std': \[0, 1, 1\].*; expected pixels scaled by 1/255"),
        ({"rescale_factor": 1 / 127.5}, r"'rescale_factor': 0.0078"),
        ({"do_rescale": False}, r"'do_rescale': False"),
        ({"image_mean": [float("nan")] * 3}, r"'image_mean': \[nan"),
    ):
        path.write_text(json.dumps(good | settings))
        with pytest.raises(ConfigError, match=message):
            image_config(tmp_path).build()
    path.write_text('{"do_normalize": false}')
    assert image_config(tmp_path).resolve().std == (1.0, 1.0, 1.0)
    path.unlink()
    with pytest.raises(ConfigError, match=r"tower.mean: .* has no preprocessor_config.json; expected mean and std"):
        image_config(tmp_path).build()
    image_config(tmp_path, pretrained=False).build()
    with pytest.raises(ValueError, match="expected numbers above 0"):
        image_config(tmp_path, std=[0.0, 1.0, 1.0])
    network = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(network | {"layer_norm_eps": float("nan")}))
    with pytest.raises(ConfigError, match=r"config\.json: layer_norm_eps: got nan; expected a finite number"):
        image_config(tmp_path, pretrained=False).build()


def test_what_is_no_image_encoder_is_refused(tmp_path):
    make_text(tmp_path / "bert")
    save(ViTMAEModel(ViTMAEConfig(**VISION)), tmp_path / "mae")  # it hides most patches
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    make_network(tmp_path / "resnet", ("ResNetModel", "ResNetConfig", resnet))
    settings = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    for name, message in (
        ("bert", "'bert', which is no encoder of images; expected an encoder of images"),
        ("mae", "gives 5 tokens for 32 pixels"),
        ("resnet", "batch-normalisation"),
    ):
        with pytest.raises(ConfigError, match=message):
            image_config(tmp_path / name, **settings).build()
    assert image_config(tmp_path / "resnet", **settings, train="none").build().is_frozen
