import itertools

import pytest
import torch

from tests.models import FSQ as FSQ_3
from tests.models import NESTED, RESIDUAL_FSQ, built, reseal, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import CheckpointError, ConfigError, ShapeError, VqclipError
from vqclip.pixels import PixelsConfig, attach
from vqclip.pixels.detail import DetailConfig
from vqclip.tokenizer.stored import fingerprint

FSQ = {"kind": "fsq", "levels": [4, 3]}
QUANTIZERS = {
    "fsq": FSQ,
    "product": {"kind": "product", "codebooks": 2, "layer": FSQ},
    "residual vq": {"kind": "residual", "depth": 2, "layer": {"kind": "vq", "dim": 3, "codebook_size": 8}},
    "vq": {"kind": "vq", "dim": 3, "codebook_size": 8},
    "residual fsq": {"kind": "residual", "depth": 2, "layer": FSQ | {"layout": "uniform"}},
}
STAGES = 3
CONVOLUTIONAL = {"kind": "convolutional", "channels": 4, "max_channels": 8, "channels_per_group": 2}


def section(quantizer, **settings):
    return {"quantizer": QUANTIZERS[quantizer], "stages": STAGES, "channels": 8, "max_channels": 8} | settings


def decoder(quantizer):
    return PixelsConfig.model_validate({"decoder": CONVOLUTIONAL, "image_size": 16, "detail": section(quantizer)})


def build(quantizer="fsq", **settings):
    torch.manual_seed(0)
    return DetailConfig.model_validate(section(quantizer, **settings)).build(4, 16)


def images(count=5):
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_stages_of_training_are_those_of_stored_ids(quantizer):
    detail = build(quantizer)
    ids, each = detail.encode(images()), len(detail.codebook_sizes) // STAGES
    assert ids.shape == (5, 4, STAGES * each)
    for stages in range(STAGES + 1):
        out = detail(images(), torch.full((5,), stages))
        assert out.ids.equal(ids)
        assert out.vectors.equal(detail.decode(ids[..., : stages * each]))
        assert out.vectors.equal(detail.decode(ids[..., : stages * each].to(torch.int16)))
    assert detail(images()).vectors.equal(out.vectors)


def test_samples_have_their_own_number_of_stages_and_left_out_ones_get_no_gradient():
    detail = build()
    stages = torch.tensor([0, 1, 2, 3, 1])
    vectors = detail(images(), stages).vectors
    alone = [detail(images()[row : row + 1], stages[row : row + 1]).vectors for row in range(5)]
    assert vectors.detach().equal(torch.cat(alone).detach())
    assert not vectors[0].any()
    vectors.sum().backward()
    full, weight = build(), detail.branch.layers[-1].weight
    assert weight.grad[:2].any()  # the first stage
    detail.zero_grad()
    detail(images(), torch.full((5,), 1)).vectors.sum().backward()
    assert not weight.grad[2:].any()
    assert full(images()).stats["tokens"] == detail(images(), stages).stats["tokens"] == 20


def test_stages_are_drawn_by_place_seed_and_step():
    detail, places = build(), torch.arange(3000)
    drawn = detail.draw_stages(places, 7)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    assert detail.draw_stages(places[order], 7).equal(drawn[order])
    assert not detail.draw_stages(places, 8).equal(drawn)
    detail.quantizer.set_seed(1)
    assert not detail.draw_stages(places, 7).equal(drawn)
    shares = torch.bincount(drawn, minlength=STAGES + 1) / 3000
    assert (shares - torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])).abs().max() < 0.03
    assert build(dropout=0.0).draw_stages(places, 7).eq(STAGES).all()


def test_training_decodes_the_stages_that_were_drawn():
    torch.manual_seed(0)
    whole = decoder("product").build(3, 4)
    vectors, places = torch.randn(5, 4, 3), torch.arange(5)
    made, stats = whole.reconstruct(vectors, images(), places, 3)
    stages = whole.detail.draw_stages(places, 3)
    assert len(set(stages.tolist())) > 1
    ids = whole.detail.encode(images())
    parts = [whole(vectors, whole.detail.decode(ids, number))[row] for row, number in enumerate(stages.tolist())]
    torch.testing.assert_close(made, torch.stack(parts))
    assert stats["tokens"] == 20
    made.sum().backward()
    assert [name for name, weight in whole.named_parameters() if weight.grad is None] == []


def test_sizes_follow_the_tokenizer():
    for tokens, size in ((1, 8), (9, 21), (16, 64)):
        detail = DetailConfig(quantizer=FSQ, stages=2, channels=8, max_channels=16).build(tokens, size)
        assert detail.encode(torch.zeros(2, 3, size, size)).shape == (2, tokens, 2)
        assert detail.encode(torch.zeros(0, 3, size, size)).shape == (0, tokens, 2)
        assert (detail.dim, detail.stages, detail.codebook_sizes) == (4, 2, (12, 12))


def test_wrong_settings_and_ids_are_named():
    with pytest.raises(ValueError, match="channels 12, max_channels 128 and channels_per_group 8; expected .* multip"):
        DetailConfig(quantizer=FSQ, channels=12)
    with pytest.raises(ConfigError, match=r"detail\.quantizer: got kind 'identity'"):
        DetailConfig(quantizer={"kind": "identity", "dim": 4}).build(4, 16)
    with pytest.raises(ConfigError, match="got 5 tokens for images of 16 x 16"):
        DetailConfig(quantizer=FSQ).build(5, 16)
    detail = build()
    with pytest.raises(ShapeError, match="detail ids: got 4 a token; expected at most 3, of 3 stages"):
        detail.decode(torch.zeros(1, 4, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"detail ids\[0, 0, 1\]: got id 12, expected codebook 1: 0 to 11, or -1"):
        detail.decode(torch.tensor([0, 12, 0]).expand(1, 4, 3))
    short = torch.zeros(1, 4, 2, dtype=torch.uint8)
    assert torch.equal(detail.decode(short), detail.decode(short.long()))
    for stages in (4, -1, 1.5, "1", True):
        with pytest.raises(ConfigError, match=f"detail: got {stages!r} stages for 3 detail ids a token; expected 0 to"):
            detail.decode(torch.zeros(1, 4, 3, dtype=torch.int64), stages)
    with pytest.raises(ShapeError, match=r"expected \(B, 3, 16, 16\)"):
        detail.encode(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_tokenizer_folder_has_the_detail_codebooks(quantizer, tmp_path):
    model = built(RESIDUAL_FSQ, FSQ_3).eval()
    plain, embedded = model.image.encode(images()), model.image.embed(model.image.encode(images()))
    name = fingerprint(model.image)
    attach(model.image, decoder(quantizer).build(model.image.quantizer.dim, 4).eval())
    model.image.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "image")
    ids = tokenizer.encode_pixels(images())
    assert ids[..., :3].equal(plain)
    assert ids[..., 3:].equal(tokenizer.encode_detail(images()))
    assert ids[..., 3:].equal(model.image.encode_detail(images()))
    assert tokenizer.encode(images()).equal(plain)
    assert tokenizer.embed(plain).equal(embedded)
    assert fingerprint(tokenizer) == name
    reader = load_tokenizer(tmp_path, "image", encode=False)
    assert reader.decode_pixels(ids.int()).equal(model.image.decode_pixels(ids))
    assert reader.bits_per_sample == model.image.bits_per_sample


def test_images_are_decoded_from_any_number_of_stages():
    tokenizer = built().eval().image
    attach(tokenizer, decoder("product").build(3, 4).eval())
    ids, vectors = tokenizer.encode_pixels(images()), tokenizer.quantizer.decode(tokenizer.encode(images()))
    made = [tokenizer.decode_pixels(ids, detail=stages) for stages in range(STAGES + 1)]
    for stages, image in enumerate(made):
        assert tokenizer.decode_pixels(ids[..., : 1 + 2 * stages]).equal(image)
        detail = tokenizer.pixels.detail(images(), torch.full((5,), stages)).vectors
        assert tokenizer.pixels_of(vectors, detail).clamp(0, 1).equal(image)
    assert tokenizer.pixels_of(vectors).clamp(0, 1).equal(made[0])
    assert tokenizer.decode_pixels(ids).equal(made[-1])
    assert all(not one.equal(other) for one, other in itertools.pairwise(made))
    with pytest.raises(ConfigError, match="detail: got 4 stages for 6 detail ids a token; expected 0 to 3 stages of 2"):
        tokenizer.decode_pixels(ids, detail=4)
    with pytest.raises(ConfigError, match="detail: got 2 stages for 2 detail ids"):
        tokenizer.decode_pixels(ids[..., :3], detail=2)
    with pytest.raises(ShapeError, match="detail ids: got 7 a token; expected at most 6"):
        tokenizer.decode_pixels(torch.cat((ids, ids[..., :1]), dim=-1))
    with pytest.raises(ShapeError, match=r"detail: got shape \(5, 4, 3\), expected \(5, 4, 12\)"):
        tokenizer.pixels_of(vectors, vectors)


def test_a_decoder_without_detail_says_so():
    tokenizer = built().eval().image
    with pytest.raises(VqclipError, match="has no detail codebooks"):
        tokenizer.encode_detail(images())
    assert tokenizer.encode_pixels(images()).equal(tokenizer.encode(images()))
    attach(tokenizer, PixelsConfig(decoder=CONVOLUTIONAL, image_size=16).build(3, 4))
    ids = tokenizer.encode_pixels(images())
    with pytest.raises(ConfigError, match="detail: got 0 stages; expected None, as this decoder has no detail"):
        tokenizer.decode_pixels(ids, detail=0)
    with pytest.raises(ShapeError, match=r"expected \(B, 4, 1\)"):
        tokenizer.decode_pixels(torch.cat((ids, ids), dim=-1))
    with pytest.raises(ShapeError, match="got vectors for a decoder without detail codebooks"):
        tokenizer.pixels_of(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": 2}, r"detail\.quantizer\.layer\.codebook: got shape \(3, 8, 3\), expected \(2, 8, 3\)"),
        ({"quantizer": NESTED}, r"pixels: detail.quantizer: Product: got \d+ codebooks .*; expected at most 65536"),
        ({"channels": 2**15, "max_channels": 2**16}, r"branch\.layers\.1\.weight: got .*\(8, 12, .* \(32768, 12"),
    ],
)
def test_a_folder_with_other_detail_settings_is_refused_before_memory_is_taken(tmp_path, values, message):
    image = tiny_model(FSQ_3).build().image
    attach(image, decoder("vq").build(3, 4))
    image.save_pretrained(tmp_path)
    reseal(tmp_path, lambda config: config["pixels"]["detail"].update(values))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path, "image", encode=False)


def test_detail_codebooks_read_images_of_the_towers_size(tmp_path):
    image = tiny_model(FSQ_3).build().image
    settings = {"decoder": CONVOLUTIONAL, "image_size": 32}
    wrong = PixelsConfig.model_validate(settings | {"detail": section("fsq")}).build(3, 4)
    message = "pixels.image_size: got 32 for a decoder with detail codebooks, .* 16, as tokenizer.tower.image_size"
    with pytest.raises(ConfigError, match=message):
        attach(image, wrong)
    assert image.pixels is None
    image.save_pretrained(tmp_path)
    attach(reader := load_tokenizer(tmp_path, "image", encode=False), wrong)  # decodes images of any size
    for encode in (reader.encode_pixels, reader.encode_detail):
        with pytest.raises(VqclipError, match="loaded with encode=False, .* expected load_tokenizer"):
            encode(images())
    with pytest.raises(VqclipError, match="this text tokenizer has no pixel decoder"):
        tiny_model(FSQ_3).build().text.encode_pixels(["a"])
    image.pixels = wrong
    image.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, "image", encode=False).pixels.image_size == reader.pixels.image_size == 32
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        load_tokenizer(tmp_path, "image")
    attach(image, PixelsConfig.model_validate(settings).build(3, 4))
    assert image.decode_pixels(image.encode_pixels(images())).shape[2:] == (32, 32)
