from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from vqclip.scenes.drawing import FIELD_CELLS, SHAPES, distance_field, draw_scene
from vqclip.scenes.scene import (
    BACKGROUNDS,
    COLOURS,
    SIZES,
    Draws,
    Scene,
    SceneObject,
    backgrounds_for,
    difference,
    lab,
    sample_scene,
)
from vqclip.scenes.splits import TRAINED


def test_draws_depend_on_the_key_alone() -> None:
    first = [Draws(1, 2, 3).uniform(0, 1) for _ in range(2)]
    assert first[0] == first[1]
    assert Draws(1, 2, 4).uniform(0, 1) != first[0]
    assert sorted(Draws(5).shuffle(range(9))) == list(range(9))
    assert {Draws(i).pick_weighted({"a": 1.0, "b": 0.0, "c": 1.0}) for i in range(50)} == {"a", "c"}


def test_colours_are_far_apart_and_stand_out() -> None:
    assert np.allclose(lab((255, 255, 255)), [100, 0, 0], atol=0.1)
    assert min(difference(a, b) for a, b in itertools.combinations(COLOURS.values(), 2)) > 30
    for pair in itertools.combinations(COLOURS, 2):
        assert backgrounds_for(frozenset(pair)), pair
    assert {b for c in COLOURS for b in backgrounds_for(frozenset([c]))} == set(BACKGROUNDS)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_fill_the_unit_circle_without_leaving_it(shape: str) -> None:
    field = distance_field(shape)
    axis = np.linspace(-1.5, 1.5, FIELD_CELLS)
    radius = np.hypot(*np.meshgrid(axis, axis))
    reach = radius[field < 0].max()
    assert 0.8 < reach < 1.1
    assert 0.2 < (field < 0).mean() * 9 / np.pi < 1  # share of the unit circle
    # A distance: its slope is 1, except on the ridges.
    slope = np.hypot(*np.gradient(field, axis[1] - axis[0]))
    assert np.median(slope) == pytest.approx(1, abs=0.02)


def test_shapes_look_different() -> None:
    masks = {shape: distance_field(shape) < 0 for shape in SHAPES}
    for a, b in itertools.combinations(SHAPES, 2):
        assert (masks[a] & masks[b]).sum() / (masks[a] | masks[b]).sum() < 0.9, (a, b)


def test_ring_has_a_hole_and_circle_none() -> None:
    middle = FIELD_CELLS // 2
    assert distance_field("ring")[middle, middle] > 0 > distance_field("circle")[middle, middle]


def test_objects_lie_inside_and_apart() -> None:
    for index in range(500):
        scene = sample_scene(Draws(7, index), TRAINED[index % len(TRAINED)], TRAINED)
        for thing in scene.objects:
            low, high = SIZES[thing.size]
            assert low - 1e-3 < thing.radius < high + 1e-3
            assert thing.radius < min(thing.x, thing.y, 1 - thing.x, 1 - thing.y)
        for a, b in itertools.combinations(scene.objects, 2):
            assert np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius
            assert a.combination != b.combination or a.size == b.size
        assert scene.background in backgrounds_for(frozenset(t.colour for t in scene.objects))
        stored = dataclasses.asdict(scene)  # as in the .json of a sample
        assert Scene(tuple(SceneObject(**each) for each in stored["objects"]), stored["background"]) == scene


@pytest.mark.parametrize("size", [64, 97])
def test_drawing_shows_the_colour_where_the_object_is(size: int) -> None:
    for colour, background in itertools.product(COLOURS, BACKGROUNDS):
        if background not in backgrounds_for(frozenset([colour])):
            continue
        thing = SceneObject(colour, "square", "large", 0.35, 0.6, 0.3, 5.0)
        pixels = draw_scene(Scene((thing,), background), size, Draws(3))
        assert pixels.shape == (size, size, 3)
        assert pixels.dtype == np.uint8
        middle = tuple(pixels[int(0.6 * size), int(0.35 * size)].tolist())
        assert min(COLOURS, key=lambda c: difference(COLOURS[c], middle)) == colour
        corner = tuple(pixels[2, -3].tolist())
        nearest = min(difference(end, corner) for end in BACKGROUNDS[background])
        assert nearest < 25


def test_edges_are_soft_and_position_is_exact() -> None:
    thing = SceneObject("black", "circle", "large", 0.4, 0.55, 0.3, 0.0)
    pixels = draw_scene(Scene((thing,), "cream"), 128, Draws(3)).astype(float).mean(2)
    y, x = np.nonzero(pixels < 70)
    assert (x.mean() + 0.5) / 128 == pytest.approx(0.4, abs=0.015)
    assert (y.mean() + 0.5) / 128 == pytest.approx(0.55, abs=0.015)
    row = pixels[int(0.55 * 128), : int(0.2 * 128)]
    assert ((row > 80) & (row < 170)).any()
