"""The grammar of captions.

meaning = choose some of the claims that are true of the scene      # `choose_meaning`
caption = choose words for the meaning                              # `realise`
"""

from __future__ import annotations

from vqclip.scenes.draws import Draws
from vqclip.scenes.meaning import RELATIONS, Meaning, Phrase, groups, holds, in_line, is_placed
from vqclip.scenes.scene import Scene

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
    return _frame(core, meaning, draws)


def _frame(core: str, meaning: Meaning, draws: Draws) -> str:
    """Add the background and an opening such as "a drawing of"."""
    plural = meaning.phrases[0].count > 1
    frame = draws.pick(FRAMES).format(be="are" if plural else "is") if draws.chance(0.2) else ""
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
        return f"{number} {' '.join(words)}{plural_ending(phrase.shape)}"
    if alone and draws.chance(0.15):
        return f"{draws.pick(('one', 'a single'))} {' '.join(words)}"
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def plural_ending(shape: str) -> str:
    """Return "s", or "es" after an s: crosses."""
    return "es" if shape.endswith("s") else "s"
