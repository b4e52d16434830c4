"""The grammar of captions, which claim only what is true of the scene.

meaning = choose some of the claims that are true of the scene      # `choose_meaning`
caption = choose words for the meaning                              # `realise`
"""

from __future__ import annotations

import dataclasses
import itertools

from vqclip.scenes.scene import Draws, Scene, SceneObject

RELATIONS = ("left of", "right of", "above", "below")


@dataclasses.dataclass(frozen=True, slots=True)
class Phrase:
    """`count` objects of one colour and shape, and their size if it is mentioned."""

    count: int
    colour: str
    shape: str
    size: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """The claims of a caption. The phrases list every object of the scene: "a red star" means that it is the only one.

    Args:
        phrases: one for each kind of object.
        relation: position of the first phrase's objects relative to all others: one of `RELATIONS`, "between", or None.
        line: arrangement of the objects of the only phrase, "row" or "column"; None if not mentioned.
        place: (horizontal, vertical) of a single object, each -1 (left, top), 0 (middle), 1 (right, bottom) or None
            if not mentioned.
        background: its name; None if not mentioned.
    """

    phrases: tuple[Phrase, ...]
    relation: str | None = None
    line: str | None = None
    place: tuple[int | None, int | None] = (None, None)
    background: str | None = None


def groups(scene: Scene) -> list[list[SceneObject]]:
    """Return the scene's objects grouped by colour and shape, in order of first appearance."""
    found: dict[tuple[str, str], list[SceneObject]] = {}
    for thing in scene.objects:
        found.setdefault(thing.combination, []).append(thing)
    return list(found.values())


def holds(meaning: Meaning, scene: Scene, lenient: bool = False) -> bool:
    """Return whether a meaning is true of a scene.

    Args:
        meaning: the claims.
        scene: the scene.
        lenient: also accept claims that are nearly true; used to check that a caption fits no other image.
    """
    found = {members[0].combination: members for members in groups(scene)}
    if set(found) != {(p.colour, p.shape) for p in meaning.phrases}:
        return False
    ordered = [found[p.colour, p.shape] for p in meaning.phrases]
    if any(len(m) != p.count or p.size not in (None, m[0].size) for m, p in zip(ordered, meaning.phrases, strict=True)):
        return False
    if meaning.background not in (None, scene.background):
        return False
    if meaning.line is not None and not in_line(ordered[0], meaning.line, lenient):
        return False
    if any(
        said is not None and not is_placed(at, said, lenient)
        for said, at in zip(meaning.place, (ordered[0][0].x, ordered[0][0].y), strict=True)
    ):
        return False
    rest = [thing for members in ordered[1:] for thing in members]
    if meaning.relation == "between":
        return len(ordered[0]) == 1 and len(rest) == 2 and _is_between(ordered[0][0], rest[0], rest[1], lenient)
    return meaning.relation is None or all(
        _has_relation(a, meaning.relation, b, lenient) for a in ordered[0] for b in rest
    )


def is_placed(at: float, third: int, lenient: bool = False) -> bool:
    """Return whether a coordinate is low (-1), central (0) or high (1)."""
    slack = 0.04 if lenient else 0.0
    if third == 0:
        return abs(at - 0.5) <= 0.04 + slack
    return (at - 0.5) * third >= 0.12 - slack


def in_line(members: list[SceneObject], line: str, lenient: bool = False) -> bool:
    """Return whether the objects are side by side ("row") or one above the other ("column")."""
    relation = "left of" if line == "row" else "above"
    ordered = sorted(members, key=lambda thing: thing.x if line == "row" else thing.y)
    return all(_has_relation(a, relation, b, lenient, steep=0.45) for a, b in itertools.pairwise(ordered))


def _has_relation(a: SceneObject, relation: str, b: SceneObject, lenient: bool, steep: float = 0.75) -> bool:
    dx, dy = b.x - a.x, b.y - a.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    along = -along if relation in ("right of", "below") else along
    return along > 0.02 if lenient else along > 0.15 and abs(across) < steep * along


def _is_between(a: SceneObject, b: SceneObject, c: SceneObject, lenient: bool) -> bool:
    return any(
        _has_relation(b, relation, a, lenient, 0.5) and _has_relation(a, relation, c, lenient, 0.5)
        for relation in RELATIONS
    )


NUMBERS = {2: "two", 3: "three"}
SIZE_WORDS = {"small": ("small", "little"), "medium": ("medium-sized",), "large": ("large", "big")}
RELATION_WORDS = {
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
    "above": ("above",),
    "below": ("below", "under"),
}
LINE_WORDS = {
    (2, "row"): ("side by side", "next to each other"),
    (2, "column"): ("one above the other",),
    (3, "row"): ("in a row",),
    (3, "column"): ("in a column",),
}
_PLACES = {
    (-1, -1): ("in the top left corner", "at the top left"),
    (1, -1): ("in the top right corner", "at the top right"),
    (-1, 1): ("in the bottom left corner", "at the bottom left"),
    (1, 1): ("in the bottom right corner", "at the bottom right"),
    (0, 0): ("in the middle", "in the centre"),
    (0, -1): ("at the top in the middle",),
    (0, 1): ("at the bottom in the middle",),
    (-1, 0): ("on the left in the middle",),
    (1, 0): ("on the right in the middle",),
    (None, -1): ("at the top",),
    (None, 1): ("at the bottom",),
    (-1, None): ("on the left",),
    (1, None): ("on the right",),
}
FRAMES = ("a picture of ", "a drawing of ", "there {be} ")


def describe(scene: Scene, draws: Draws, detail: float) -> tuple[str, Meaning]:
    """Return a caption that is true of the scene, and its meaning.

    Args:
        scene: what to describe.
        draws: random draws of the choices.
        detail: 0 to 1; probability that the caption mentions sizes, place or relation, and background.
    """
    meaning = choose_meaning(scene, draws, detail)
    assert holds(meaning, scene), (meaning, scene)
    return realise(meaning, draws), meaning


def choose_meaning(scene: Scene, draws: Draws, detail: float) -> Meaning:
    """Choose some of the true claims."""
    ordered = draws.shuffle(groups(scene))
    with_sizes = draws.chance(detail)
    phrases = tuple(
        Phrase(len(m), m[0].colour, m[0].shape, m[0].size if with_sizes and draws.chance(0.85) else None)
        for m in ordered
    )
    background = scene.background if draws.chance(detail) else None
    with_position = draws.chance(0.4 + 0.6 * detail)
    if len(scene.objects) == 1:
        place = _choose_place(scene, draws) if with_position and draws.chance(0.3 + 0.7 * detail) else (None, None)
        return Meaning(phrases, place=place, background=background)
    if len(ordered) == 1:
        lines = [line for line in ("row", "column") if with_position and in_line(ordered[0], line)]
        return Meaning(phrases, line=draws.pick(lines) if lines else None, background=background)
    options = [Meaning(phrases, relation, background=background) for relation in ("between", *RELATIONS)]
    if len(phrases) == 3:  # any of the three may be the subject
        turned = [(phrases[1], phrases[0], phrases[2]), (phrases[2], phrases[0], phrases[1])]
        options += [Meaning(p, r, background=background) for p in turned for r in ("between", *RELATIONS)]
    true = [option for option in options if with_position and holds(option, scene)]
    return draws.pick(true) if true else Meaning(phrases, background=background)


def _choose_place(scene: Scene, draws: Draws) -> tuple[int | None, int | None]:
    thing = scene.objects[0]
    thirds = [next((t for t in (-1, 0, 1) if is_placed(at, t)), None) for at in (thing.x, thing.y)]
    # Sometimes mention only one side: "on the left" is true of a corner as well.
    if draws.chance(0.25):
        thirds[int(draws.uniform(0, 2))] = None
    place = (thirds[0], thirds[1])
    return place if place in _PLACES else (None, None)


def realise(meaning: Meaning, draws: Draws) -> str:
    """Choose words for a meaning."""
    names = [_noun_phrase(phrase, draws, alone=len(meaning.phrases) == 1) for phrase in meaning.phrases]
    if meaning.relation == "between":
        core = f"{names[0]} between {' and '.join(names[1:])}"
    elif meaning.relation is not None:
        core = f"{names[0]} {draws.pick(RELATION_WORDS[meaning.relation])} {' and '.join(names[1:])}"
    elif len(names) == 3:
        core = f"{names[0]}, {names[1]} and {names[2]}"
    else:
        core = " and ".join(names)
    if meaning.line is not None:
        core += " " + draws.pick(LINE_WORDS[meaning.phrases[0].count, meaning.line])
    if meaning.place != (None, None):
        core += " " + draws.pick(_PLACES[meaning.place])
    frame = draws.pick(FRAMES).format(be="are" if meaning.phrases[0].count > 1 else "is") if draws.chance(0.2) else ""
    if meaning.background is None:
        return frame + core
    article = "an" if meaning.background[0] in "aeiou" else "a"
    if not frame and draws.chance(0.25):
        return f"{article} {meaning.background} background with {core}"
    return f"{frame}{core} {draws.pick(('on', 'against'))} {article} {meaning.background} background"


def _noun_phrase(phrase: Phrase, draws: Draws, alone: bool) -> str:
    size = [draws.pick(SIZE_WORDS[phrase.size])] if phrase.size is not None else []
    words = [*size, phrase.colour, phrase.shape]
    if phrase.count > 1:
        number = "a pair of" if phrase.count == 2 and draws.chance(0.2) else NUMBERS[phrase.count]
        return f"{number} {' '.join(words)}{'es' if phrase.shape.endswith('s') else 's'}"
    if alone and draws.chance(0.15):
        return f"{draws.pick(('one', 'a single'))} {' '.join(words)}"
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"
