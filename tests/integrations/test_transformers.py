"""vqclip's models as classes of transformers: the same ids and scores, from the same folders, or a refusal."""

import copy
import importlib
import json
import logging
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vqclip
from tests.models import IDENTITY, PRODUCT, tiny_model
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.model import CLIP
from vqclip.pixels import TransformerPixelsConfig, attach

transformers = pytest.importorskip("transformers", reason="pip install 'vqclip[transformers]'")

from vqclip.integrations import transformers as ours  # noqa: E402

CAPTIONS = ["a red square", "", "two blue circles"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)  # without gradients, as what is loaded: torch then chooses other kernels
    return tiny_model(PRODUCT, PRODUCT, temperature={"bias": -3.0}).build().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """As a run writes it."""
    model.save_pretrained(path := tmp_path_factory.mktemp("run") / "tokenizer")
    return path


@pytest.fixture(scope="module")
def images():
    draws = np.random.default_rng(0)
    flat = [Image.fromarray(draws.integers(0, 256, (20, 30, 3), dtype=np.uint8)) for _ in range(2)]
    return [*flat, Image.fromarray(draws.integers(0, 256, (17, 16, 4), dtype=np.uint8))]


def test_image_ids_are_ours(folder, images):
    own = vqclip.load_tokenizer(folder, "image")
    processor = ours.VqclipImageProcessor.from_pretrained(folder)
    tokenizer = ours.VqclipImageTokenizer.from_pretrained(folder)
    inputs, ids = processor(images), own.encode(images)
    assert inputs.pixel_values.equal(torch.stack([own.preprocess(image) for image in images]))
    codes = tokenizer.encode(**inputs).image_codes
    assert codes.equal(ids)
    assert codes.dtype == torch.int64
    assert tokenizer.encode(inputs.pixel_values / 255).image_codes.equal(own.encode(inputs.pixel_values / 255))
    assert tokenizer.encode(**inputs.to(torch.float16)).image_codes.equal(ids)  # bytes stay bytes
    assert tokenizer.decode(codes).equal(own.decode(ids))
    assert tokenizer.embed(codes).equal(own.embed(ids))
    assert tokenizer(**inputs).image_embeds.equal(own.embed(ids))
    tokens = tokenizer.get_image_tokens(inputs.pixel_values, offset=1000)
    assert tokens.equal(own.to_vocabulary(ids, 1000))
    assert tokenizer.tokens_to_codes(tokens, offset=1000).equal(ids)
    assert (tokenizer.num_tokens, tokenizer.codebook_sizes) == (own.num_tokens, own.codebook_sizes)


def test_text_ids_are_ours(folder):
    own = vqclip.load_tokenizer(folder, "text")
    vocabulary = ours.VqclipVocabulary.from_pretrained(folder)
    tokenizer = ours.VqclipTextTokenizer.from_pretrained(folder)
    inputs, ids = vocabulary(CAPTIONS, return_tensors="pt", padding=True), own.encode(CAPTIONS)
    assert tokenizer.encode(**inputs).text_codes.equal(ids)
    assert inputs.attention_mask.bool().equal(own.ids_mask(ids))
    assert tokenizer(**inputs).text_embeds.equal(own.embed(ids))
    tokens = tokenizer.get_text_tokens(**inputs, offset=9)
    assert tokens.equal(own.to_vocabulary(ids, 9))
    assert tokenizer.tokens_to_codes(tokens, 9).equal(ids)
    assert vocabulary(CAPTIONS[0])["input_ids"] == inputs.input_ids[0].tolist()
    with pytest.raises(ShapeError, match="attention_mask: got a mask"):
        tokenizer.encode(inputs.input_ids, torch.ones_like(inputs.input_ids))


@pytest.mark.parametrize(
    ("name", "modalities"),
    [("VqclipImageTokenizer", ["image"]), ("VqclipTextTokenizer", ["text"]), ("VqclipModel", ["image", "text"])],
)
def test_saved_folders_are_read_by_the_auto_classes_and_by_vqclip(folder, images, tmp_path, name, modalities):
    cls = getattr(ours, name)
    cls.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert type(loaded) is cls
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "saved")) is cls.config_class
    assert not loaded.training
    if "image" in modalities:
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "saved")
        assert type(processor) is ours.VqclipImageProcessor
        ids = vqclip.load_tokenizer(folder, "image").encode(images)
        assert vqclip.load_tokenizer(tmp_path / "saved", "image").encode(processor(images).pixel_values).equal(ids)
    if "text" in modalities:
        vocabulary = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        ids = vqclip.load_tokenizer(folder, "text").encode(CAPTIONS)
        tokens = vocabulary(CAPTIONS, return_tensors="pt").input_ids
        assert vqclip.load_tokenizer(tmp_path / "saved", "text").encode(tokens).equal(ids)
    loaded.save_pretrained(tmp_path / "saved")  # again, over it
    with pytest.raises(ConfigError, match=rf"^{name}: got a configuration without weights; expected {name}.from_pre"):
        transformers.AutoModel.from_config(loaded.config)


@pytest.mark.parametrize("name", ["VqclipImageTokenizer", "VqclipModel"])
def test_a_pixel_decoder_is_kept(model, images, tmp_path, name):
    whole = copy.deepcopy(model)
    attach(whole.image, TransformerPixelsConfig(width=16, depth=1).build(whole.image.quantizer.dim, 4, 16))
    whole.save_pretrained(tmp_path / "one")
    getattr(ours, name).from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    again = ours.VqclipImageTokenizer.from_pretrained(tmp_path / "two")
    ids = whole.image.encode(images)
    assert again.decode_pixels(ids).equal(whole.image.decode_pixels(ids))
    assert not hasattr(again.config, "pixels")


def test_a_surrounding_autocast_changes_no_bit(folder, images):
    tokenizer = ours.VqclipImageTokenizer.from_pretrained(folder)
    pixels = ours.VqclipImageProcessor.from_pretrained(folder)(images * 20).pixel_values
    prompts = ours.VqclipVocabulary.from_pretrained(folder)(CAPTIONS, return_tensors="pt").input_ids
    models = [ours.VqclipModel.from_pretrained(folder, embeddings=each) for each in ("codes_only", "continuous")]

    def numbers():
        yield from (tokenizer.encode(pixels).image_codes, tokenizer(pixels).image_embeds)
        for model in models:
            out = model(pixel_values=pixels, input_ids=prompts)
            yield from (out.logits_per_image, out.image_embeds, out.text_embeds)

    plain = [*numbers()]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, numbers(), plain))


def test_a_conversion_that_changes_ids_is_refused_and_a_wider_type_and_back_keeps_every_bit(folder, images):
    tokenizer = ours.VqclipImageTokenizer.from_pretrained(folder)
    for convert in (lambda: tokenizer.half(), lambda: tokenizer.to("cpu", torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"got a conversion to torch\.\w*float16 .* ids would change"):
            convert()
    assert {each.dtype for each in tokenizer.parameters()} == {torch.float32}
    own = vqclip.load_tokenizer(folder, "image").double()
    wide = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, device_map={"": "cpu"})
    pixels = ours.VqclipImageProcessor.of(own)(images).pixel_values
    assert wide.clip.image.encode(pixels).equal(own.encode(pixels))
    narrow, state = wide.float(), CLIP.from_pretrained(folder).state_dict()
    assert all(narrow.clip.state_dict()[name].equal(value) for name, value in state.items())


@pytest.mark.parametrize("embeddings", ["codes_only", "continuous"])
def test_the_pipeline_gives_our_scores(folder, model, images, embeddings, caplog):
    labels, template = ["red square", "blue circle", "dog"], "a photo of a {}"
    loaded = ours.VqclipModel.from_pretrained(folder, embeddings=embeddings)
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.ERROR):
        pipe = transformers.pipeline(
            "zero-shot-image-classification",
            model=loaded,
            tokenizer=ours.VqclipVocabulary.from_pretrained(folder),
            image_processor=ours.VqclipImageProcessor.from_pretrained(folder),
        )
    assert caplog.text == ""
    pixels = model.image.batch(images[0])
    prompts = model.text.batch([template.format(label) for label in labels])
    with torch.no_grad():
        if embeddings == "continuous":
            image, text = model.image.continuous(pixels), model.text.continuous(prompts)
        else:
            image, text = model.image.embed(model.image.encode(pixels)), model.text.embed(model.text.encode(prompts))
        scale, bias = model.temperature()
        logits = scale * image @ text.T + bias
        out = loaded(pixel_values=pixels, input_ids=prompts)
    assert out.logits_per_image.equal(logits)
    assert out.logits_per_text.equal(logits.T)
    answers = pipe(images[0], candidate_labels=labels, hypothesis_template=template)
    scores = dict(zip(labels, logits.softmax(dim=-1)[0].tolist(), strict=True))
    assert {each["label"]: each["score"] for each in answers} == scores


def test_one_processor_takes_captions_and_images(folder, model, images, tmp_path):
    """Called as CLIP's own, such as by mteb."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    assert type(processor) is ours.VqclipProcessor
    pixels, tokens = processor.image_processor(images).pixel_values, model.text.preprocess(CAPTIONS)
    both = processor(text=CAPTIONS, images=images, return_tensors="pt", padding=True)
    assert sorted(both) == sorted(processor.model_input_names)
    assert both.pixel_values.equal(pixels)
    assert both.input_ids.equal(tokens)
    loaded = ours.VqclipModel.from_pretrained(folder)
    out = loaded(**both.to("cpu"))
    text, image = processor(text=CAPTIONS, truncation=True), processor(images=images, return_tensors="np", padding=True)
    assert loaded.get_text_features(**text).equal(out.text_embeds)
    assert loaded.get_image_features(torch.from_numpy(image["pixel_values"])).equal(out.image_embeds)
    assert processor(text=CAPTIONS[0], images=images[0]).pixel_values.equal(pixels[:1])
    loaded.save_pretrained(tmp_path / "saved")
    assert processor.save_pretrained(tmp_path / "saved") == ()
    with pytest.raises(ShapeError, match="got neither text nor images"):
        processor(return_tensors="pt")
    for name, value in (("do_rescale", True), ("do_resize", False)):
        with pytest.raises(ConfigError, match=f"got {name}={value}; expected none of these"):
            processor(images=images, **{name: value})


def test_a_processor_of_its_own_folder(tmp_path, images):
    processor = ours.VqclipImageProcessor(image_size=24, mode="squash", interpolation="bilinear")
    processor.save_pretrained(tmp_path)
    again = ours.VqclipImageProcessor.from_pretrained(tmp_path)
    assert again(images, return_tensors="np").pixel_values.tolist() == processor(images).pixel_values.tolist()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_size": 10**9}))
    with pytest.raises(ConfigError, match="image_size: got 1000000000"):
        ours.VqclipImageProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_implementation": "sdpa"}, "got attn_implementation='sdpa'; expected none of these"),
        ({"token": "secret"}, "Set HF_TOKEN"),
        ({"device_map": "balanced"}, "device_map: got 'balanced', which cannot be used"),
        ({"dtype": "float17"}, "dtype: got 'float17'"),
        ({"dtype": "bfloat16"}, "ids would change"),
        ({"embeddings": "codes"}, "embeddings: got 'codes', expected one of codes_only, continuous"),
    ],
)
def test_options_without_a_meaning_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        ours.VqclipModel.from_pretrained(folder, **options)


def test_wrong_inputs_and_folders_say_what_to_do(folder, model, images, tmp_path):
    tokenizer = ours.VqclipImageTokenizer.from_pretrained(folder)
    with pytest.raises(ShapeError, match="pixel_values: got a list.*VqclipImageProcessor"):
        tokenizer.encode(images)
    with pytest.raises(ShapeError, match="input_ids: got a list.*return_tensors='pt'"):
        ours.VqclipTextTokenizer.from_pretrained(folder).encode([[1, 2]])
    model.text.save_pretrained(tmp_path / "text")
    for cls in (ours.VqclipImageTokenizer, ours.VqclipImageProcessor):
        with pytest.raises(CheckpointError, match="contains text tokenizer; expected one of modality 'image'"):
            cls.from_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match="got images=") as error:
        ours.VqclipVocabulary.from_pretrained(folder)(CAPTIONS, images=torch.rand(100, 3, 40, 40))
    assert len(str(error.value)) < 500
    tiny_model(IDENTITY, IDENTITY).build().save_pretrained(tmp_path / "continuous")
    with pytest.raises(ConfigError, match="got 'codes_only', but the image quantizer has no codes"):
        ours.VqclipModel.from_pretrained(tmp_path / "continuous")
    ours.VqclipModel.from_pretrained(tmp_path / "continuous", embeddings="continuous")
    config = ours.VqclipConfig(image={"embed_dim": 3})
    with pytest.raises(CheckpointError, match="config: its section image differs"):
        ours.VqclipModel.from_pretrained(folder, config=config)
    tiny_model(text_quantizer=PRODUCT).build().save_pretrained(tmp_path / "other")
    vocabulary = ours.VqclipVocabulary.from_pretrained(folder)
    assert vocabulary.save_pretrained(tmp_path / "other") == ()
    with pytest.raises(CheckpointError, match="expected a tokenizer folder"):
        vocabulary.save_pretrained(tmp_path)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(CheckpointError, match="format is None"):
        ours.VqclipModel.from_pretrained(tmp_path / "other")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("vqclip.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install 'vqclip\[transformers\]'"):
        importlib.import_module("vqclip.integrations.transformers")
