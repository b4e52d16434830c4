"""Images of any shape: patches within a budget, masks through everything, and ids that keep the shape."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

import vqclip
from tests.data.making import encode, write_tar
from tests.models import LFQ, PRODUCT, RESIDUAL, tiny_model
from tests.training import contrastive_step, largest_difference, metrics, retrieval, run, run_tree, weights
from vqclip.data import Batch
from vqclip.data.transforms import EvalTransformConfig, TrainTransformConfig
from vqclip.demo.answers import Answers
from vqclip.errors import ConfigError, ShapeError, VqclipError
from vqclip.export.to_onnx import export_program
from vqclip.integrations.open_clip import load
from vqclip.integrations.transformers.models import VqclipModel
from vqclip.integrations.transformers.processing import VqclipImageProcessor
from vqclip.nn.shapes import PatchBudget, cells_of, shape_mask, shapes_of
from vqclip.pixels import attach
from vqclip.pixels.decoder import ConvolutionalPixelsConfig
from vqclip.tokenize_dataset.job import _layout
from vqclip.towers.naflex import NaFlexTowerConfig
from vqclip.train.plan import plan_step
from vqclip.train.tasks.contrastive import TrainConfig

ARGS = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "pos_embed_grid_size": [3, 4], "reg_tokens": 1}
SIZES = ((30, 30), (20, 60), (90, 20), (8, 300), (16, 17), (3, 2))
ATTENTION = {"kind": "attention", "heads": 2}
SHAPES = [(3, 3), (2, 6), (6, 2), (1, 12), (3, 4), (4, 3)]


def tower(tokens=12, **args):
    return {"kind": "naflex", "name": "naflexvit_base_patch16_gap", "max_tokens": tokens, "args": ARGS | args}


def built(quantizer=LFQ, tokens=12, **image):
    tree = tiny_model(quantizer, quantizer).model_dump(mode="json")
    tree["image"] |= {"tower": tower(tokens)} | image
    torch.manual_seed(0)
    return vqclip.model.ModelConfig.model_validate(tree).build()


def pictures(sizes=SIZES):
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


@pytest.mark.parametrize("side", [1, 2, 3, 60, 64, 1000])
def test_a_grid_fits_the_budget_and_the_proportions(side):
    size = PatchBudget(4, side)
    for height, width in itertools.product((1, 7, 64, 500, 9000), repeat=2):
        rows, columns = size.grid(height, width)
        assert size.grid(width, height) == (columns, rows) or height == width
        assert 1 <= rows * columns <= side
        assert max(rows, columns) <= 255
        if height == width:
            assert rows == columns == math.isqrt(side)
        # Each side has less than a patch more than the scale of the other one asks for.
        assert rows - 1 < columns * height / width
        assert columns - 1 < rows * width / height
        scales = (min(n / height, min(side // n, 255) / width) for n in range(1, min(side, 255) + 1))
        assert min(rows / height, columns / width) == pytest.approx(max(scales))


def test_patches_hold_the_image_and_its_shape():
    size = PatchBudget(4, 12)
    image = torch.randint(0, 256, (3, 8, 16), dtype=torch.uint8)
    patches = size.cut(image)
    assert patches.shape == size.shape
    assert torch.equal(patches[5, :-2].view(4, 4, 3), image[:, 4:8, 4:8].permute(1, 2, 0))
    assert patches[5, -2:].tolist() == [2, 2]
    assert not patches[8:].any()
    assert torch.equal(size.join(patches), image)


def test_the_mask_keeps_the_shape():
    shapes = torch.tensor([[3, 4], [1, 12], [12, 1], [2, 3], [1, 1], [0, 0]])
    mask = shape_mask(shapes, 13)
    assert mask[0].tolist() == [True] * 4 + [False] + [True] * 8
    assert mask[3].tolist() == [True] * 3 + [False] + [True] * 3 + [False] * 6
    assert torch.equal(shapes_of(mask), shapes)
    square = cells_of(shape_mask(torch.tensor([[3, 3]]), 10), 3)[0]
    assert square[[0, 1, 2, 4, 5, 6, 7, 8, 9]].tolist() == [*range(9)]
    wide = cells_of(shape_mask(torch.tensor([[1, 6]]), 10), 3)[0]
    assert wide[:6].tolist() == [0, 0, 1, 1, 2, 2]


PROPORTIONAL = {"pos_embed_ar_preserving": True, "pos_embed_grid_size": [4, 4]}


@pytest.mark.parametrize(
    "args", [{}, PROPORTIONAL, {"pos_embed_interp_mode": "bilinear"}, {"class_token": True}], ids=str
)
def test_features_equal_those_of_timm(args):
    torch.manual_seed(0)
    built = NaFlexTowerConfig.model_validate(tower(**args)).build().eval()
    with torch.no_grad():
        built.backbone.model.embeds.pos_embed.normal_()
    transform = EvalTransformConfig().build(built.size)
    images = torch.stack([transform(torch.randint(0, 256, (3, *size), dtype=torch.uint8)) for size in SIZES])
    pixels, rows, columns = built.normalize(images)
    places = torch.stack([rows, columns], dim=-1).sub(1).clamp(min=0)
    model = built.backbone.model
    theirs = model.forward_features(pixels, patch_coord=places, patch_valid=rows > 0)["patches"]
    mask = built.mask(images)
    torch.testing.assert_close(built(images)[mask], theirs[:, model.num_prefix_tokens :][rows > 0], rtol=0, atol=2e-6)
    assert shapes_of(mask).tolist() == [list(shape) for shape in SHAPES]
    assert built(images[:0]).shape == (0, 13, 16)


@pytest.mark.parametrize("mode", ["crop", "squash"])
def test_nothing_of_a_long_image_is_cropped(mode):
    image = torch.zeros(3, 8, 300, dtype=torch.uint8)
    image[:, :, :30], image[:, :, -30:] = 255, 255
    size = PatchBudget(4, 12)
    found = size.join(EvalTransformConfig(mode=mode).build(size)(image))
    assert found.shape == (3, 4, 48)
    assert (found[..., :3] == 255).all()
    assert (found[..., -3:] == 255).all()
    assert (found[..., 8:-8] == 0).all()


@pytest.mark.parametrize("mode", ["crop", "squash"])
def test_square_images_are_those_of_a_square_tower(mode):
    """As large ones, to the bit, so that a budget of square patches changes nothing for square images."""
    image = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    square, size = EvalTransformConfig(mode=mode).build(12), PatchBudget(4, 9)
    assert torch.equal(size.join(EvalTransformConfig(mode=mode).build(size)(image)), square(image))
    assert size.grid(40, 40) == (3, 3)
    augment = TrainTransformConfig(scale=(0.3, 1.0), flip=0.5, rotation=20, translation=0.1, hue=0.1)
    square_crops = 0
    for seed in range(8):
        ours, theirs = (augment.build(each)(image, np.random.default_rng(seed)) for each in (size, 12))
        if ours[:, -2:].amax(dim=0).tolist() == [3, 3]:
            square_crops += 1
            assert torch.equal(size.join(ours), theirs)
    assert square_crops


def test_augmentation_keeps_the_proportions_of_the_image():
    size, rng = PatchBudget(4, 36), np.random.default_rng(0)
    image = torch.randint(0, 256, (3, 20, 80), dtype=torch.uint8)
    whole = TrainTransformConfig(scale=(1, 1), ratio=(1, 1)).build(size)(image, rng)
    assert size.join(whole).shape == (3, 12, 48)
    assert torch.equal(whole, EvalTransformConfig(mode="squash").build(size)(image))
    turned = TrainTransformConfig(scale=(1, 1), ratio=(1, 1), quarter_turns=True).build(size)
    seen = {size.join(turned(image, rng)).shape for _ in range(12)}
    assert seen == {(3, 12, 48), (3, 48, 12)}
    crops = TrainTransformConfig(scale=(0.2, 1), ratio=(1, 1)).build(size)
    assert all(size.join(crops(image, rng)).shape == (3, 12, 48) for _ in range(12))


@pytest.mark.parametrize("quantizer", [LFQ, PRODUCT, RESIDUAL], ids=["lfq", "product", "residual"])
@pytest.mark.parametrize("image", [{}, {"project_in": ATTENTION}, {"reduce": {"kind": "queries"}}], ids=str)
def test_padded_equals_cropped(quantizer, image):
    """In every loss and statistic, and in the gradient; a larger budget adds padding alone."""
    model = built(quantizer, tokens=40, **image).double()
    size = PatchBudget(4, 12)
    transform = EvalTransformConfig().build(size)
    images = torch.stack([transform(torch.randint(0, 256, (3, *each), dtype=torch.uint8)) for each in SIZES])
    tokens = model.text.preprocess([f"caption {number}" for number in range(len(SIZES))])
    results = []
    for patches in (12, 40):
        padded = images.new_zeros(len(images), patches, images.shape[2])
        padded[:, :12] = images
        model.zero_grad()
        step = contrastive_step(model, precision="fp64")
        batch = Batch(0, 0, padded, tokens, torch.arange(6), torch.full((6,), -1), torch.arange(6), 6)
        local = step.task.local(batch)
        out = step.task.run(step.task.student, local, 0)
        sums = step.task.reduce(out, local)
        terms, factors = step.task.losses(out, sums, [local], 0)
        sum(term * factors[name] for name, term in terms.items()).backward()
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        results.append((terms, dict(sums["image"].sums), out.rows, gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def test_ids_keep_the_shape_and_do_not_depend_on_the_batch_nor_on_compiling():
    image = built(PRODUCT).image.eval().double()
    ids = image.encode(pictures())
    assert ids.shape == (6, 13, 2)
    assert image.shapes(ids).tolist() == [list(shape) for shape in SHAPES]
    for number, picture in enumerate(pictures()):
        assert torch.equal(image.encode(picture)[0], ids[number])
    out = image(image.batch(pictures()))
    assert torch.equal(image.embed(ids), out.embedding)
    assert torch.equal(out.ids, ids)
    vectors = image.decode(ids)
    assert (vectors[ids[..., 0] < 0] == 0).all()
    torch.testing.assert_close(image.embed(ids[2:3]), out.embedding[2:3], rtol=0, atol=1e-12)
    compiled = torch.compile(image.train(), backend="eager", fullgraph=True)(image.batch(pictures()))
    assert torch.equal(compiled.ids, out.ids)
    ids[0, 4] = -1
    for wrong in (ids, torch.zeros(1, 13, 2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=r"ids\[0\]: got absent tokens"):
            image.embed(wrong)
    assert image.encode([]).shape == (0, 13, 2)


def test_a_folder_keeps_it(tmp_path):
    image = built(PRODUCT).image.eval()
    image.save_pretrained(tmp_path / "tokenizer")
    loaded = vqclip.load_tokenizer(tmp_path / "tokenizer", "image")
    ids = image.encode(pictures())
    assert torch.equal(loaded.encode(pictures()), ids)
    decoder = vqclip.load_tokenizer(tmp_path / "tokenizer", "image", encode=False)
    assert torch.equal(decoder.shapes(ids), image.shapes(ids))
    assert torch.equal(decoder.embed(ids), image.embed(ids))
    square = tiny_model().build().image
    with pytest.raises(VqclipError, match="no images of any shape"):
        square.shapes(square.encode(pictures()))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A shard of 24 captioned images of mixed shapes."""
    draw, members = np.random.default_rng(1), {}
    for number in range(24):
        size = (draw.integers(8, 60), draw.integers(8, 60))
        image = encode(draw.integers(0, 256, (*size, 3), dtype=np.uint8), "PNG")
        members |= {f"{number:04d}.png": image, f"{number:04d}.txt": f"caption {number}".encode()}
    return write_tar(tmp_path_factory.mktemp("mixed") / "0.tar", members)


def tree_of(folder, shards, **changes):
    return run_tree(folder, shards, LFQ, model__image__tower=tower(), train__steps=8, **changes)


def test_one_and_three_processes_train_the_same_model(ranks, tmp_path, mixed):
    """With stored views and microbatches, and the evaluation of what it exports; such a run can be planned."""
    changes = {"data__transform": {"scale": [0.4, 1.0], "flip": 0.5}, "train__batch_size": 11, "data__views": 2}
    changes |= {"train__micro_batches": 2, "evaluation": retrieval(mixed)}
    outcomes = {}
    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        ranks(world_size, run, tree_of(folder, mixed, **changes), str(tmp_path / "cache"), init=False)
        outcomes[world_size] = metrics(folder), weights(folder, 8)
    assert plan_step(TrainConfig.model_validate(tree_of(tmp_path, mixed)), processes=1).peak > 0
    (lines, model), (others, other_model) = outcomes.values()
    assert any("eval/pairs/codes_only/i2t_r1" in line for line in lines)
    for line, other in zip(lines, others, strict=True):
        for name in (name for name in line if name.startswith(("loss/", "grad_norm", "temperature/", "image/"))):
            assert other[name] == pytest.approx(line[name], rel=1e-6), (line["step"], name)
    assert largest_difference(model, other_model) < 1e-6


TEACHER = {"kind": "embeddings", "teacher": {"kind": "open_clip", "model": "ViT-B-32", "pretrained": "openai"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__views": 1, "data__feature_cache": {"modalities": ["image"]}}, "kind: got naflex.*feature_cache"),
        ({"distillation": [TEACHER]}, "kind: got naflex.*distillation of embeddings"),
        ({"model__image__pixels": {"decoder": {"kind": "convolutional"}}}, "got pixels with tower.kind naflex"),
    ],
)
def test_what_needs_squares_is_refused(tmp_path, mixed, changes, message):
    tree = tree_of(tmp_path, mixed, **changes)
    tree["model"]["image"]["tower"]["train"] = "none" if "feature_cache" in message else "all"
    with pytest.raises((ConfigError, ValidationError), match=f"(?s){message}"):
        TrainConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": ARGS | {"rope_type": "axial"}}, "rope_type"),
        ({"args": ARGS | {"patch_drop_rate": 0.1}}, "patch_drop_rate"),
        ({"args": ARGS | {"depht": 2}}, "depht"),
        ({"name": "vit_tiny_patch16_224", "args": {}}, "expected a NaFlexVit"),
        ({"name": "naflexvit_bas_patch16_gap"}, "did you mean"),
    ],
)
def test_other_networks_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"tower.*{message}"):
        NaFlexTowerConfig.model_validate(tower() | changes).build()


def test_other_uses_are_refused(tmp_path):
    model, folder = built(), str(tmp_path / "both")
    model.save_pretrained(folder)
    decoder = ConvolutionalPixelsConfig().build(model.image.quantizer.dim, 16, image_size=16)
    for use in (
        lambda: attach(model.image, decoder),
        lambda: export_program(model.image, "encode"),
        lambda: load(folder),
        lambda: VqclipImageProcessor.from_pretrained(folder),
        lambda: VqclipModel.from_pretrained(folder),
        lambda: Answers.load(folder),
        lambda: _layout(model.image),
    ):
        with pytest.raises(ConfigError, match=r"image\.tower\.kind: got naflex"):
            use()
    with pytest.raises(ShapeError, match=r"expected patches \(B, 1 to 12, 50\)"):
        model.image.encode(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    images = model.image.batch(pictures())
    images[1, 3, -1] += 1
    with pytest.raises(ShapeError, match=r"images\[1\]: got other rows"):
        model.image.encode(images)
