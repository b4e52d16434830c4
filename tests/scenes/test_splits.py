from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from tests.scenes.parser import parse, untrue
from vqclip.errors import DataError
from vqclip.scenes import HELD_OUT, TRAINED
from vqclip.scenes.drawing import SHAPES
from vqclip.scenes.scene import COLOURS, OBJECT_COUNTS
from vqclip.scenes.splits import TEMPLATES, class_names, labelled_samples, train_samples, val_samples


def test_held_out_combinations_are_balanced() -> None:
    assert len(set(HELD_OUT) | set(TRAINED)) == len(HELD_OUT) + len(TRAINED) == len(COLOURS) * len(SHAPES) == 121
    assert set(Counter(c for c, _ in HELD_OUT).values()) == {2}
    assert set(Counter(s for _, s in HELD_OUT).values()) == {2}
    assert {c for c, _ in HELD_OUT} == set(COLOURS)
    assert {s for _, s in HELD_OUT} == set(SHAPES)


def test_any_eleven_training_combinations_in_a_row_hold_every_colour_and_shape() -> None:
    for start in range(0, len(TRAINED), 11):
        part = TRAINED[start : start + 11]
        assert {c for c, _ in part} == set(COLOURS)
        assert {s for _, s in part} == set(SHAPES)


def test_train_never_shows_a_held_out_combination_and_val_shows_nothing_else() -> None:
    train = [o.combination for s in train_samples(0, 600, 32) for o in s.scene.objects]
    val = [o.combination for s in val_samples(0, 200, 32) for o in s.scene.objects]
    assert set(train) == set(TRAINED)
    assert set(val) == set(HELD_OUT)


def test_scenes_of_one_two_and_three_objects_have_their_share_of_train() -> None:
    counts = Counter(len(s.scene.objects) for s in train_samples(0, 1000, 32))
    for objects, share in OBJECT_COUNTS.items():
        assert abs(counts[objects] / 1000 - share) < 0.05, objects  # three deviations of a count of 650 are 0.045


def test_a_picture_depends_on_its_index_alone() -> None:
    few, many = list(train_samples(3, 5, 32)), list(train_samples(3, 9, 32))
    for a, b in zip(few, many, strict=False):
        assert a.caption == b.caption
        assert np.array_equal(a.pixels, b.pixels)
    other = next(train_samples(4, 1, 32))
    assert not np.array_equal(other.pixels, few[0].pixels)


def test_val_captions_are_true_of_their_own_picture_alone() -> None:
    samples = list(val_samples(0, 300, 32))
    for i, sample in enumerate(samples):
        claims = parse(sample.caption or "")
        fits = [
            j for j, other in enumerate(samples) if not untrue_or_wrong_shape(claims, dataclasses.asdict(other.scene))
        ]
        assert fits == [i], sample.caption
    assert len({s.caption for s in samples}) == len(samples)


def untrue_or_wrong_shape(claims, scene) -> bool:
    """As `untrue`, for scenes that have quite other objects (where places and relations cannot be asked)."""
    if {t[2:] for t in claims.things} != {(o["colour"], o["shape"]) for o in scene["objects"]}:
        return True
    counts = Counter((o["colour"], o["shape"]) for o in scene["objects"])
    return any(counts[t[2:]] != t[0] for t in claims.things) or bool(untrue(claims, scene))


def test_val_asking_for_more_than_can_be_told_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vqclip.scenes.splits.describe", lambda scene, draws, detail: describe_tersely(scene))
    with pytest.raises(DataError, match=r"val image \d+ .* ask for fewer"):
        list(val_samples(0, 40_000, 32, attempts=3))


def describe_tersely(scene):
    from vqclip.scenes.captions import Meaning, Phrase, groups

    phrases = tuple(Phrase(len(m), m[0].colour, m[0].shape) for m in groups(scene))
    return "terse", Meaning(phrases)


@pytest.mark.parametrize(("split", "classes", "shown"), [("test", 99, TRAINED), ("heldout", 121, HELD_OUT)])
def test_labelled_splits(split: str, classes: int, shown) -> None:
    names = class_names(split)
    assert len(set(names)) == len(names) == classes
    samples = list(labelled_samples(0, split, 2 * len(shown), 32))
    assert set(Counter(s.label for s in samples).values()) == {2}
    for sample in samples:
        (thing,) = sample.scene.objects
        assert sample.label is not None
        assert names[sample.label] == f"{thing.colour} {thing.shape}"
        assert thing.combination in shown


def test_test_pictures_are_not_training_pictures() -> None:
    train = {s.pixels.tobytes() for s in train_samples(0, 300, 32)}
    assert not any(s.pixels.tobytes() in train for s in labelled_samples(0, "test", 300, 32))


def test_templates_read_well_with_every_class() -> None:
    for template in TEMPLATES:
        assert template.count("{c}") == 1
        assert not template.endswith((" a {c}", " an {c}"))
        assert template != "a {c}"
