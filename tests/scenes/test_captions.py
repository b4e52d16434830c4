from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.scenes.parser import parse, untrue
from vqclip.scenes.captions import Meaning, Phrase, describe, holds
from vqclip.scenes.scene import Draws, Scene, SceneObject, sample_scene
from vqclip.scenes.splits import TRAINED


def thing(colour: str, shape: str, x: float, y: float, size: str = "small") -> SceneObject:
    return SceneObject(colour, shape, size, x, y, 0.15, 0.0)


@pytest.mark.parametrize("detail", [0.0, 0.5, 1.0])
def test_every_caption_reads_back_as_claims_that_are_true(detail: float) -> None:
    seen = Counter()
    for index in range(1500):
        draws = Draws(1, index)
        scene = sample_scene(draws, TRAINED[index % len(TRAINED)], TRAINED)
        caption, meaning = describe(scene, draws, detail)
        claims = parse(caption)
        assert untrue(claims, dataclasses.asdict(scene)) == [], (caption, scene)
        assert claims.background == meaning.background
        assert [t[:2] for t in claims.things] == [(p.count, p.size) for p in meaning.phrases], caption
        for kind in ("relation", "line", "horizontal", "vertical", "background"):
            seen[getattr(claims, kind)] += 1
    if detail == 0.5:
        expected = {"left", "right", "above", "below", "between", "side by side", "in a row", "one above the other"}
        assert expected | {"in a column", "middle", "top", "bottom"} <= set(seen)


def test_the_verifier_of_these_tests_sees_untrue_captions() -> None:
    scene = dataclasses.asdict(Scene((thing("red", "star", 0.2, 0.5), thing("blue", "ring", 0.8, 0.5)), "grey"))
    assert untrue(parse("a small red star to the left of a blue ring on a grey background"), scene) == []
    for caption in (
        "a red star to the right of a blue ring",
        "a red star above a blue ring",
        "a large red star and a blue ring",
        "a red star and a blue star",
        "a red star",
        "two red stars and a blue ring",
        "a red star and a blue ring on a navy background",
    ):
        assert untrue(parse(caption), scene), caption


def test_holds_tells_true_from_untrue() -> None:
    scene = Scene((thing("red", "star", 0.2, 0.5), thing("blue", "ring", 0.8, 0.5, "large")), "grey")
    star, ring = Phrase(1, "red", "star"), Phrase(1, "blue", "ring")
    assert holds(Meaning((star, ring), "left of", background="grey"), scene)
    assert holds(Meaning((ring, star), "right of"), scene)
    untrue_ones = [
        Meaning((star, ring), "right of"),
        Meaning((star, ring), "above"),
        Meaning((star, ring), background="navy"),
        Meaning((dataclasses.replace(star, size="large"), ring)),
        Meaning((dataclasses.replace(star, count=2), ring)),
        Meaning((star,)),
    ]
    assert not any(holds(meaning, scene) for meaning in untrue_ones)


def test_lenient_reading_takes_a_slant_for_above_and_left() -> None:
    scene = Scene((thing("red", "star", 0.3, 0.3), thing("blue", "ring", 0.7, 0.7)), "grey")
    phrases = (Phrase(1, "red", "star"), Phrase(1, "blue", "ring"))
    for relation in ("left of", "above"):
        assert not holds(Meaning(phrases, relation), scene)
        assert holds(Meaning(phrases, relation), scene, lenient=True)


def test_articles_and_plurals() -> None:
    scene = Scene((thing("orange", "cross", 0.2, 0.5), thing("orange", "cross", 0.8, 0.5)), "grey")
    assert {describe(scene, Draws(i), 0.0)[0] for i in range(200)} >= {"two orange crosses", "a pair of orange crosses"}
    one = Scene((thing("orange", "cross", 0.5, 0.5),), "grey")
    assert {describe(one, Draws(i), 0.0)[0] for i in range(200)} >= {"an orange cross", "one orange cross"}
