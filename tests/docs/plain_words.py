"""Count sentences and names that are not plain English: ``python -m tests.docs.plain_words [path ...]``.

Reads docstrings, comments, strings and the names of functions and classes in Python files, and Markdown prose;
prints each finding with its place. Without paths: everything but the records of the past (docs/log.md, docs/adr,
CHANGELOG.md). To keep a finding on purpose, add it with a reason to `DEFENDED`.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "scripts", "examples", "benchmarks", "docs", "README.md", "CONTRIBUTING.md", "configs")
PAST = ("docs/log.md", "docs/adr", "CHANGELOG.md")

FIRST_WORDS = ("What", "Of", "As", "Those", "Where", "How", "Whether", "Raises", "That", "The same", "All that", "Who")
"""Docstrings do not begin with these; "Whether ..." is kept for fields, "Raises:" for sections."""

PHRASES = {
    "picture": r"\bpictures?\b",
    "alike": r"\balike\b",
    "there are such": r"\b(?:are|is) (?:none )?such\b",
    "lies": r"\b(?:lies?|lay|lain)\b",
    "stands": r"\b(?:stands?|stood)\b(?!-)(?! for\b)",
    "is no X": r"\b(?:what|that|which|it) (?:is|are) no (?!longer|more|less)",
    "whoever": r"\b(?:whoever|whosoever|whichever)\b",
    "in vain": r"\bin vain\b",
    "let off": r"\blet off\b",
    "as many": r"\b(?:for|there are) as many\b|\bso many of\b",
    "at a stroke": r"\bat a stroke\b|\bin one stroke\b",
    "without a word": r"\bwithout a word\b",
    "goes on": r"\b(?:goes?|went|going) on\b(?! to\b)",
    "tells": r"\b(?:tells? of|is told|are told|was told)\b",
    "asunder": r"\b(?:hence|thereof|therein|whereof|wherein|herein|upon which|lest|ere|aught|naught|nought)\b",
    "a good many": r"\b(?:a good many|seldom|beforehand|anew)\b",
    "comes to": r"\bcomes to\b",
    "says": r"\bsays? (?:so|it again|whose|whence)\b",
    "whose it is": r"\b(?:whose it is|what it is worth|as it has it)\b",
    "take care": r"\btakes? (?:down|care of the rest)\b",
    "micro-batch": r"\bmicro-batch(?:es)?\b",
}
"""Name → pattern, in lower case; the standard word is in docs/adr or DESIGN's list: image, equal, contains, is, ..."""

PARTICIPLES = re.compile(r"^_?(?:[a-z]+(?:ed|en|wn|ld)|made|told|sent|kept|held|left|met|found|built|drawn|read_of)$")
"""Functions named by a bare participle; properties and booleans (`is_...`) are adjectives and may be."""
VERBS_THAT_HAPPEN_TO_FIT = {
    "embed", "_embed", "feed", "need", "_need", "seed", "_seed", "shared", "hidden", "open", "_open", "hold", "build",
    "_build", "child", "fold", "_fold", "golden", "scaled", "spread", "listen", "shutdown", "flatten", "_flatten",
    "_own", "own", "spawn", "_rebuild", "widen", "_widen", "shorten", "token", "tighten", "unfold", "yield",
    "threshold", "shed", "speed",
}  # fmt: skip
HOUSEHOLD = {
    "look", "_look", "tell", "_tell", "hand_on", "agree", "_agree", "see", "say", "note", "put", "take",
    "noted", "_noted", "fail", "heard_by",
}  # fmt: skip
NOUNS = {"Kept", "Facts", "Share", "_Share", "Attempt", "ReadingHalf", "Doubting", "Found", "Done", "Place", "Side"}

DEFENDED: dict[tuple[str, str], str] = {
    ("src/vqclip/scenes/captions.py", "a picture of"): "part of the drawn data",
    ("src/vqclip/scenes/splits.py", "a picture of one"): "part of the drawn data",
}
"""(file, text of the finding) → the reason why it stays."""

CODE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|\([^)\s]*\.(?:md|html)[^)\s]*\)|\S*/\S*|\S+_\S+|\{[^}]*\}|</?\w+>")


class Finding(NamedTuple):
    """Something that a reader would have to read twice."""

    file: str
    line: int
    kind: str
    text: str


def _prose(text: str) -> str:
    """Text without code: `names`, ``literals``, addresses, indented blocks and quoted commands."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    return CODE.sub(" ", text)


def phrases(text: str, file: str, line: int) -> Iterator[Finding]:
    """Yield every phrase of `PHRASES` in a text that begins in ``line``."""
    for number, each in enumerate(_prose(text).split("\n"), line):
        for name, pattern in PHRASES.items():
            for match in re.finditer(pattern, each.lower()):
                around = each[max(0, match.start() - 30) : match.end() + 30].strip()
                yield Finding(file, number, name, around)


def in_python(source: str, file: str) -> Iterator[Finding]:
    """Yield the findings of one Python file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield from _docstrings(body, file)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _names(node, file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from phrases(node.value, file, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from phrases(token.string, file, token.start[0])


def _docstrings(body: list[ast.stmt], file: str) -> Iterator[Finding]:
    for number, statement in enumerate(body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            text = statement.value.value
            is_field = number > 0
            if isinstance(text, str):
                for first in FIRST_WORDS:
                    if text.startswith((f"{first} ", f"{first},")) and not (is_field and first == "Whether"):
                        yield Finding(file, statement.lineno, f"begins with {first}", text.split("\n")[0][:70])


def _names(node: ast.FunctionDef | ast.ClassDef, file: str) -> Iterator[Finding]:
    if isinstance(node, ast.ClassDef):
        if node.name in NOUNS:
            yield Finding(file, node.lineno, "abstract name", node.name)
        return
    decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
    if "property" in decorators or "contextmanager" in decorators:
        return
    if node.name in HOUSEHOLD:
        yield Finding(file, node.lineno, "household verb", node.name)
    elif PARTICIPLES.match(node.name) and node.name not in VERBS_THAT_HAPPEN_TO_FIT:
        yield Finding(file, node.lineno, "participle", node.name)


def findings(paths: list[Path]) -> list[Finding]:
    """Return all findings in files and folders, in order."""
    found: list[Finding] = []
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            if name.startswith(PAST) or "__pycache__" in name:
                continue
            if file.suffix == ".py":
                found += in_python(file.read_text(), name)
            elif file.suffix in (".md", ".yaml"):
                found += phrases(file.read_text(), name, 1)
    return sorted({each for each in found if (each.file, each.text) not in DEFENDED})


def main() -> int:
    """Print the findings and their number by kind; return 1 if there are any."""
    paths = [Path(each).resolve() for each in sys.argv[1:]] or [ROOT / each for each in FOLDERS]
    found = findings(paths)
    for each in found:
        print(f"{each.file}:{each.line}: {each.kind}: {each.text}")
    for kind, count in Counter(each.kind for each in found).most_common():
        print(f"{count:5} {kind}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
