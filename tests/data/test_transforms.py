import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from tests.data.making import pixels
from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransformConfig, TrainTransformConfig, _random_box
from vqclip.errors import ShapeError

COLOURS = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.1}
MOVES = {"flip": 0.5, "quarter_turns": True, "rotation": 20, "translation": 0.1}
EVERYTHING = TrainTransformConfig(scale=(0.3, 1.0), **MOVES, **COLOURS)


def image(number: int = 0, height: int = 50, width: int = 70) -> torch.Tensor:
    return torch.from_numpy(pixels(number, height, width).copy()).permute(2, 0, 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("config", [TrainTransformConfig(), EVERYTHING, TrainTransformConfig(interpolation="bilinear")])
@pytest.mark.parametrize("shape", [(50, 70), (1, 1), (3, 500), (64, 64)])
def test_training_gives_squares_of_bytes(config: TrainTransformConfig, shape: tuple[int, int]) -> None:
    result = config.build(32)(image(0, *shape), rng())
    assert result.shape == (3, 32, 32)
    assert result.dtype == torch.uint8


def test_training_draws_from_its_generator_alone() -> None:
    transform = EVERYTHING.build(32)
    torch.manual_seed(0)
    first = transform(image(), rng(1))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, transform(image(), rng(1)))
    assert not torch.equal(first, transform(image(), rng(2)))
    transform(image(), rng(1))
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_flips_and_all_quarter_turns_move_pixels_alone() -> None:
    square = image(0, 32, 32)
    config = TrainTransformConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    flipping, turning = (config.model_copy(update=each) for each in ({"flip": 1.0}, {"quarter_turns": True}))
    assert torch.equal(config.build(32)(square, rng()), square)
    assert torch.equal(flipping.build(32)(square, rng()), square.flip(2))
    turned = _results(turning.build(32), square)
    assert {next(k for k in range(4) if torch.equal(out, square.rot90(k, (1, 2)))) for out in turned} == {0, 1, 2, 3}


def _results(transform, square: torch.Tensor) -> list[torch.Tensor]:
    return [transform(square, rng(seed)) for seed in range(40)]


def test_translation_moves_by_whole_pixels_onto_white() -> None:
    square = image(0, 20, 20) // 2
    transform = TrainTransformConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), translation=0.2).build(20)
    moved = set()
    for out in _results(transform, square):
        down, right = (_shift_of(out, square, axis) for axis in (1, 2))
        moved.add((down, right))
        rolled = square.roll((down, right), (1, 2))
        inside = (out != 255).all(0)
        assert torch.equal(out[:, inside], rolled[:, inside])
        assert int((~inside).sum()) == 400 - (20 - abs(down)) * (20 - abs(right))
    assert len(moved) > 15
    assert all(abs(down) <= 4 and abs(right) <= 4 for down, right in moved)


def _shift_of(out: torch.Tensor, square: torch.Tensor, axis: int) -> int:
    lines = (out == 255).all(0).all(2 - axis).tolist()
    blank = sum(lines)
    return blank if lines[0] else -blank


def test_random_boxes_are_inside_and_as_asked() -> None:
    generator = rng()
    for height, width in ((40, 60), (100, 7), (1, 1)):
        for _ in range(300):
            top, left, h, w = _random_box(height, width, (0.2, 0.8), (0.5, 2.0), generator)
            assert 0 <= top < top + h <= height
            assert 0 <= left < left + w <= width
            if height == 40:
                assert 0.17 < h * w / 2400 < 0.83
                assert 0.45 < w / h < 2.2


def test_evaluation_crops_the_centre() -> None:
    stripes = torch.zeros(3, 30, 90, dtype=torch.uint8)
    stripes[:, :, 30:60] = 200
    assert (EvalTransformConfig().build(16)(stripes) == 200).all()
    assert (EvalTransformConfig().build(16)(stripes.transpose(1, 2)) == 200).all()
    squashed = EvalTransformConfig(mode="squash").build(30)(stripes)
    assert (squashed[:, :, :8] == 0).all()
    assert (squashed[:, :, 12:18] == 200).all()


@pytest.mark.parametrize("mode", ["crop", "squash"])
def test_evaluation_resizes_like_pillow(mode: str) -> None:
    original = Image.fromarray(pixels(3, 90, 90))
    ours = EvalTransformConfig(mode=mode).build(32)(pil_to_uint8(original))
    theirs = pil_to_uint8(original.resize((32, 32), Image.Resampling.BICUBIC))
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("bad", [torch.zeros(3, 5, 5), torch.zeros(1, 5, 5).byte(), torch.zeros(2, 3, 5, 5)])
def test_wrong_tensors_are_named(bad: torch.Tensor) -> None:
    for call in (EvalTransformConfig().build(8), lambda x: TrainTransformConfig().build(8)(x, rng())):
        with pytest.raises(ShapeError, match=r"expected \(3, H, W\) uint8"):
            call(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": (0.9, 0.5)}, r"scale: got \[0.9, 0.5\]; expected \[smallest, largest\]"),
        ({"scale": (0.5, 1.5)}, "at most 1.0"),
        ({"ratio": (2.0, 1.0)}, "ratio: got"),
    ],
)
def test_wrong_configuration(change: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainTransformConfig(**change)
