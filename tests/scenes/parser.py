"""Read a caption back into claims, knowing only English: nothing here is taken from the grammar that writes them."""

import itertools
import re
from dataclasses import dataclass

COUNTS = {"a": 1, "an": 1, "one": 1, "a single": 1, "two": 2, "a pair of": 2, "three": 3}
SIZES = {"small": "small", "little": "small", "medium-sized": "medium", "large": "large", "big": "large"}
RELATIONS = {
    "to the left of": "left",
    "left of": "left",
    "to the right of": "right",
    "right of": "right",
    "above": "above",
    "below": "below",
    "under": "below",
    "between": "between",
}
LINES = ["side by side", "next to each other", "one above the other", "in a row", "in a column"]
NOUN = re.compile(
    r"(?P<count>a single|a pair of|an|a|one|two|three) (?:(?P<size>small|little|medium-sized|large|big) )?"
    r"(?P<colour>\w+) (?P<shape>\w+)"
)


@dataclass(frozen=True)
class Claims:
    things: list[tuple[int, str | None, str, str]]
    """(count, size or None, colour, shape), shape in the singular."""
    relation: str | None
    line: str | None
    horizontal: str | None
    vertical: str | None
    background: str | None


def parse(caption: str) -> Claims:
    text, background = caption, None
    if match := re.fullmatch(r"an? (\w+) background with (.*)", text):
        background, text = match[1], match[2]
    elif match := re.fullmatch(r"(.*) (?:on|against) an? (\w+) background", text):
        text, background = match[1], match[2]
    text = re.sub(r"^(a picture of|a drawing of|there is|there are) ", "", text)
    text, horizontal, vertical = _place(text)
    line = next((words for words in LINES if text.endswith(" " + words)), None)
    if line:
        text = text.removesuffix(" " + line)
    relation = None
    for words in sorted(RELATIONS, key=len, reverse=True):
        if f" {words} " in text:
            relation, text = RELATIONS[words], text.replace(f" {words} ", " and ")
            break
    things = [_thing(part) for part in re.split(r", | and ", text)]
    return Claims(things, relation, line, horizontal, vertical, background)


def _place(text: str) -> tuple[str, str | None, str | None]:
    if match := re.fullmatch(r"(.*) (?:in|at) the (top|bottom) (left|right)(?: corner)?", text):
        return match[1], match[3], match[2]
    if match := re.fullmatch(r"(.*) (?:at|on) the (top|bottom|left|right) in the middle", text):
        return match[1], *((match[2], "middle") if match[2] in ("left", "right") else ("middle", match[2]))
    if match := re.fullmatch(r"(.*) in the (?:middle|centre)", text):
        return match[1], "middle", "middle"
    if match := re.fullmatch(r"(.*) at the (top|bottom)", text):
        return match[1], None, match[2]
    if match := re.fullmatch(r"(.*) on the (left|right)", text):
        return match[1], match[2], None
    return text, None, None


def _thing(text: str) -> tuple[int, str | None, str, str]:
    match = NOUN.fullmatch(text)
    assert match, f"not a noun phrase: {text!r}"
    count, shape = COUNTS[match["count"]], match["shape"]
    if count > 1:
        assert shape.endswith("s")
        shape = "cross" if shape == "crosses" else shape.removesuffix("s")
    word_after = match["size"] or match["colour"]
    if match["count"] in ("a", "an"):
        assert (match["count"] == "an") == (word_after[0] in "aeiou"), text
    return count, SIZES[match["size"]] if match["size"] else None, match["colour"], shape


def untrue(claims: Claims, scene: dict) -> list[str]:
    """Return what a caption says wrongly of a scene (as stored in the json), by plain geometry."""
    wrong = []
    things = scene["objects"]
    members = []
    for count, size, colour, shape in claims.things:
        found = [t for t in things if (t["colour"], t["shape"]) == (colour, shape)]
        members.append(found)
        if len(found) != count:
            wrong.append(f"{count} {colour} {shape}: there are {len(found)}")
        if size and any(t["size"] != size for t in found):
            wrong.append(f"{colour} {shape}: not {size}")
    if sum(map(len, members)) != len(things):
        wrong.append("an object is not named")
    if claims.background and claims.background != scene["background"]:
        wrong.append("background")
    if claims.relation == "between":
        (a,), (b, c) = members[0], [t for m in members[1:] for t in m]
        across = min(abs(b[k] - a[k]) + abs(a[k] - c[k]) - abs(b[k] - c[k]) for k in "xy")
        spread = max((a["x"] - b["x"]) * (c["x"] - a["x"]), (a["y"] - b["y"]) * (c["y"] - a["y"]))
        if across > 1e-9 or spread <= 0:
            wrong.append("between")
    elif claims.relation:
        axis, sign = {"left": ("x", 1), "right": ("x", -1), "above": ("y", 1), "below": ("y", -1)}[claims.relation]
        rest = [t for m in members[1:] for t in m]
        if not all(sign * (b[axis] - a[axis]) > 0.15 for a in members[0] for b in rest):
            wrong.append(claims.relation)
    if claims.line:
        axis = "y" if claims.line in ("one above the other", "in a column") else "x"
        values = sorted(t[axis] for t in things)
        if any(high - low < 0.15 for low, high in itertools.pairwise(values)):
            wrong.append(claims.line)
    wrong += [w for w, at in ((claims.horizontal, "x"), (claims.vertical, "y")) if w and not _at(things[0][at], w)]
    return wrong


def _at(value: float, where: str) -> bool:
    if where == "middle":
        return 0.45 < value < 0.55
    return value < 0.4 if where in ("left", "top") else value > 0.6
