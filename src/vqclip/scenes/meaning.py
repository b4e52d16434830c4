"""The claims that a caption makes, and the check that they are true of a scene. Captions use only true claims."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from vqclip.scenes.scene import Scene, SceneObject

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
    return meaning.relation is None or is_related(ordered[0], meaning.relation, ordered[1:], lenient)


def is_placed(at: float, third: int, lenient: bool = False) -> bool:
    """Return whether a coordinate is low (-1), central (0) or high (1)."""
    slack = 0.04 if lenient else 0.0
    if third == 0:
        return abs(at - 0.5) <= 0.04 + slack
    return (at - 0.5) * third >= 0.12 - slack


def is_related(subject: list[SceneObject], relation: str, others: Sequence[list[SceneObject]], lenient: bool) -> bool:
    """Return whether every object of the subject has the relation to every object of all the others."""
    rest = [thing for members in others for thing in members]
    if relation == "between":
        return len(subject) == 1 and len(rest) == 2 and _is_between(subject[0], rest[0], rest[1], lenient)
    return all(_has_relation(a, relation, b, lenient) for a in subject for b in rest)


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
