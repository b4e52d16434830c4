import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models import FSQ, LFQ, PRODUCT, RESIDUAL, VQ, built, on_the_border, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary import DelayedCodes, Vocabulary
from vqclip.model import CLIP
from vqclip.nn.precision import AUTOCAST_DTYPES
from vqclip.pixels import PixelsConfig, attach
from vqclip.tokenizer.stored import fingerprint

CAPTIONS = ["a red star", "two small blue circles on a grey background", "x"]


def pictures(count=3):
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8)


@pytest.mark.parametrize("quantizer", [FSQ, LFQ, PRODUCT, VQ, RESIDUAL])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stored_ids_give_the_training_embedding_bit_for_bit(quantizer, training, dtype):
    model = built(quantizer).train(training).to(dtype)
    tokens, images = model.text.preprocess(CAPTIONS), pictures()
    for tokenizer, inputs in ((model.image, images), (model.text, tokens)):
        out = tokenizer(inputs)
        ids = tokenizer.encode(inputs)
        assert ids.dtype == torch.int64
        assert ids.shape == (3, tokenizer.num_tokens, len(tokenizer.codebook_sizes))
        assert torch.equal(ids, out.ids)
        assert ids.is_contiguous()
        assert torch.equal(tokenizer.embed(ids), out.embedding)
        assert torch.equal(tokenizer.quantizer.decode(ids).to(dtype), out.vectors)
        assert tokenizer.features(inputs)[0].dtype == tokenizer.decode(ids).dtype == out.embedding.dtype == dtype
        torch.testing.assert_close(out.embedding.norm(dim=-1), torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("dtype", AUTOCAST_DTYPES.values())
def test_a_surrounding_autocast_changes_no_bit(dtype):
    model, images = built(FSQ).eval(), pictures(40)
    decoder = {"kind": "convolutional", "channels": 4, "max_channels": 8, "channels_per_group": 2}
    detail = {"quantizer": FSQ, "stages": 2, "channels": 8, "max_channels": 8}
    pixels = PixelsConfig.model_validate({"decoder": decoder, "image_size": 16, "detail": detail})
    attach(model.image, pixels.build(model.image.quantizer.dim, 4).eval())
    plain = [*numbers(model.image, images), *numbers(model.text, CAPTIONS * 13)]
    with torch.autocast("cpu", dtype):
        inside = [*numbers(model.image, images), *numbers(model.text, CAPTIONS * 13)]
    assert [each.dtype for each in inside] == [each.dtype for each in plain]
    assert all(map(torch.equal, inside, plain))


def numbers(tokenizer, inputs):
    """Everything that a tokenizer computes of samples and of their ids."""
    ids = tokenizer.encode(inputs)
    yield from (ids, tokenizer.decode(ids), tokenizer.embed(ids))
    if tokenizer.pixels is not None:
        every = tokenizer.encode_pixels(inputs)
        yield from (every, tokenizer.encode_detail(inputs), tokenizer.decode_pixels(every))


@pytest.mark.parametrize("precision", AUTOCAST_DTYPES)
def test_a_lower_precision_is_asked_for_by_name(precision):
    tokenizer, images = built(FSQ).image.eval(), pictures(40)
    with torch.autocast("cpu", AUTOCAST_DTYPES[precision]):
        out = tokenizer(images)
    assert torch.equal(tokenizer.encode(images, precision), out.ids)
    assert torch.equal(tokenizer.embed(out.ids, precision), out.embedding)
    assert not torch.equal(tokenizer.embed(out.ids), out.embedding)
    with pytest.raises(ConfigError, match="precision: got 'int8'; expected one of fp32"):
        tokenizer.encode(images, "int8")


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("encode", [True, False])
def test_loaded_weights_are_not_rounded(saved, convert, encode):
    loaded = load_tokenizer(saved[1], "image", encode=encode)
    for module in (loaded, torch.nn.Sequential(loaded), CLIP.from_pretrained(saved[1])):
        with pytest.raises(ConfigError, match=r"got a conversion to torch\.\w*float16 .*stored as torch.float32: ids"):
            convert(module)
        assert {each.dtype for each in module.parameters()} == {torch.float32}
    again = copy.deepcopy(loaded).double().float().state_dict()
    assert all(torch.equal(again[name], each) for name, each in loaded.state_dict().items())


@pytest.mark.parametrize("tower", ["vit", "convolutional", "text"])
def test_in_float64_the_rounding_of_float32_decides_no_id(tower):
    """Features lie within the last bits of float32 of a border, so a step in float32 would change ids."""
    tokenizer, batch = on_the_border(tower)
    wide = copy.deepcopy(tokenizer).double()
    expected = wide.encode(batch)
    assert not torch.equal(tokenizer.encode(batch), expected)
    for size in (1, 3, 8):
        with torch.backends.mkldnn.flags(enabled=size == 3):
            assert torch.equal(torch.cat([wide.encode(part) for part in batch.split(size)]), expected)
    assert fingerprint(wide) == fingerprint(tokenizer)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_token_is_absent_when_all_of_its_ids_are(modality):
    """-1 beside other ids is a code that was left out, as in the dropped stages of a residual quantizer."""
    model = built(PRODUCT).eval()
    tokenizer = getattr(model, modality)
    torch.nn.init.normal_(tokenizer.project_out[0].bias)
    ids = tokenizer.encode(["a b c d e f g h i j"] * 2 if modality == "text" else pictures(2))
    ids[0, 2], ids[1, 1, 0] = -1, -1
    vectors = tokenizer.decode(ids)
    assert ((vectors == 0).all(-1)).nonzero().tolist() == [[0, 2]]
    embedding = tokenizer.embed(ids)
    torch.nn.init.normal_(tokenizer.pool.position.data[2])  # of a token that is there, and of an absent one
    assert torch.equal(tokenizer.embed(ids)[0], embedding[0])
    assert not torch.allclose(tokenizer.embed(ids)[1], embedding[1])
    assert torch.equal(torch.compile(tokenizer.decode, backend="eager", fullgraph=True)(ids), vectors)


def test_a_row_without_tokens_is_no_nan():
    model = built().train()
    tokens = model.text.preprocess(CAPTIONS)
    tokens[1] = 0
    out = model.text(tokens)
    assert (out.ids[1] == -1).all()
    assert out.embedding.isfinite().all()
    assert torch.equal(model.text.embed(out.ids), out.embedding)
    out.embedding.square().sum(0)[0].backward()
    assert all(p.grad.isfinite().all() for p in model.text.parameters() if p.grad is not None)


def test_empty_batches_pass_through():
    model = built()
    images, tokens = pictures(0), torch.zeros(0, 12, dtype=torch.int64)
    out = model(images, tokens)
    assert out.image.embedding.shape == out.text.embedding.shape == (0, 16)
    assert model.image.embed(model.image.encode(images)).shape == (0, 16)
    assert (model.image.encode([]).shape, model.text.encode([]).shape) == ((0, 4, 1), (0, 12, 1))
    (out.image.embedding.sum() + out.text.embedding.sum()).backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == ["logit_scale"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 5, 1, dtype=torch.int64), r"ids: got shape \(2, 5, 1\), expected \(B, 4, 1\)"),
        (torch.full((1, 4, 1), 64), "ids.*: got id 64, expected codebook 0"),
        (torch.zeros(1, 4, 1), "^ids: got .*expected integers"),
        (torch.tensor(2**64 - 1, dtype=torch.uint64).expand(1, 4, 1), "^ids: got .*expected ids that fit int64"),
        (np.zeros((1, 4, 1), np.int64), r"^ids: got a ndarray of shape \(1, 4, 1\).*torch.from_numpy\(ids\) makes one"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    tokenizer = built().image
    for use in (tokenizer.decode, tokenizer.embed, tokenizer.to_vocabulary):
        with pytest.raises(ShapeError, match=message):
            use(ids)


@pytest.mark.parametrize("normalize", ["layer", "l2"])
def test_one_channel_has_nothing_to_normalize(normalize):
    config = tiny_model({"kind": "lfq", "bits": 1})
    least = 3 if normalize == "layer" else 2
    with pytest.raises(ConfigError, match=rf"^image.normalize {normalize}: got 1 channel, .* at least {least}, or"):
        config.image.model_copy(update={"normalize": normalize}).build(16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32, torch.uint64])
def test_ids_of_any_integer_type_mean_the_same(dtype):
    """Files hold the smallest type that fits; torch itself compares no uint16, uint32 or uint64."""
    model = tiny_model().build().eval()
    ids = model.image.encode(pictures(2))
    stored = ids.to(dtype)
    assert torch.equal(model.image.embed(stored), model.image.embed(ids))
    assert torch.equal(model.image.decode(stored), model.image.decode(ids))
    flat = model.image.to_vocabulary(ids)
    assert torch.equal(model.image.to_vocabulary(stored), flat)
    assert torch.equal(model.image.from_vocabulary(flat.to(dtype)), ids)
    delayed = DelayedCodes(model.image.codebook_sizes)
    assert torch.equal(delayed.from_vocabulary(delayed.to_vocabulary(stored).to(dtype)), ids)
    both = Vocabulary(image=model.image.codebook_sizes, text=model.text.codebook_sizes)
    assert torch.equal(both.from_vocabulary(both.to_vocabulary(stored, "image").to(dtype), "image"), ids)


def test_an_image_has_all_of_its_tokens_in_a_vocabulary():
    """A caption may be shorter."""
    model = tiny_model(PRODUCT, PRODUCT).build()
    ids = torch.zeros(1, 4, 2, dtype=torch.int64)
    flat = model.image.to_vocabulary(ids)
    for cut in (flat[:, :6], flat.repeat(1, 2)):
        with pytest.raises(ShapeError, match=r"vocabulary ids as \(B, N, C\): got shape .*, expected \(B, 4, 2\)"):
            model.image.from_vocabulary(cut)
    with pytest.raises(ShapeError, match=r"ids: got shape \(1, 3, 2\), expected \(B, 4, 2\)"):
        model.image.to_vocabulary(ids[:, :3])
    assert torch.equal(model.text.from_vocabulary(model.text.to_vocabulary(ids)), ids)
    with pytest.raises(ShapeError, match=r"expected \(B, 1 to 12, 2\)"):
        model.text.from_vocabulary(flat.repeat(1, 4))


@pytest.mark.parametrize("modality", ["image", "text"])
def test_preprocessing_is_pickled_without_the_weights(modality):
    """For the workers of a data loader that spawns."""
    tokenizer = getattr(built(), modality)
    pickled, inputs = pickle.dumps(tokenizer.preprocess), CAPTIONS
    assert len(pickled) < 2000 < len(pickle.dumps(tokenizer)) // 20
    if modality == "image":
        inputs = Image.effect_noise((40, 30), 90)
    assert torch.equal(pickle.loads(pickled)(inputs), tokenizer.preprocess(inputs))


def test_images_come_as_pictures_or_tensors_of_bytes_or_of_0_to_1():
    tokenizer = built().image.eval()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    tensor = tokenizer.preprocess(picture)
    assert tensor.dtype == torch.uint8
    ids = tokenizer.encode(picture)
    assert torch.equal(ids, tokenizer.encode(tensor[None]))
    assert torch.equal(ids, tokenizer.encode([picture]))
    assert tokenizer.encode(Image.new("RGBA", (50, 20))).shape == (1, 4, 1)
    images = torch.rand(2, 3, 16, 16)
    tokenizer.encode(images)
    for wrong in (-0.01, 1.01, 255.0, torch.nan):
        images[1, 2, 3, 4] = wrong
        with pytest.raises(ShapeError, match=r"images: got floating point from .*, expected 0 to 1: neither 0..255"):
            tokenizer.encode(images)


PICTURE = Image.new("RGB", (16, 16))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("cat.jpg", r"^images: got 'cat.jpg' \(str\), expected a PIL image; PIL.Image.open reads a file"),
        ([PICTURE, None], r"^images\[1\]: got None"),
        (np.zeros((16, 16, 3), np.uint8), r"^images: got a ndarray of shape \(16, 16, 3\) and dtype uint8.*fromarray"),
        ([torch.zeros(3, 16, 16)], r"^images\[0\]: got a Tensor of shape.*torch.stack"),
        ((each for each in [PICTURE]), r"^images: got <generator.*a list of PIL images or a \(B, 3, H, W\) tensor"),
    ],
)
def test_what_is_no_picture_is_refused(images, message):
    tokenizer = built().image
    with pytest.raises(ShapeError, match=message):
        tokenizer.encode(images)
    if not isinstance(images, list):
        with pytest.raises(ShapeError, match=message.replace("images", "image", 1)):
            tokenizer.preprocess(images)


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ("a cat", r"^captions: got 'a cat' \(str\), expected a list of str with one caption: \[caption\]"),
        (["a", 3], r"^captions\[1\]: got 3 \(int\), expected a str"),
        ([b"a"], r"^captions\[0\]: got b'a' \(bytes\), expected a str; bytes become one by .decode"),
        (np.zeros((1, 12), np.int64), r"^captions: got a ndarray of shape \(1, 12\) and dtype int64"),
        (torch.full((1, 12), 49408), r"^tokens: got the number 49408, expected 0 to 49407"),
        (torch.tensor([[49406, 49407] + [0] * 10, [49406] + [5] * 11]), r"^tokens\[1\]: got a row without the end "),
        (torch.zeros(1, 12), r"^tokens: got shape \(1, 12\) and dtype torch.float32, expected \(B, 1 to 12\) int64"),
    ],
)
def test_what_is_no_caption_is_refused(captions, message):
    with pytest.raises(ShapeError, match=message):
        built().text.encode(captions)
