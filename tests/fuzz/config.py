"""The reader of configurations on mutated YAML and mutated overrides."""

import json
import random
from pathlib import Path

from tests.fuzz.mutate import mutated
from vqclip.config import to_yaml
from vqclip.errors import ConfigError
from vqclip.train.tasks.kinds import load_task_config

CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = (
    b"&a ", b"*a", b"<<: *a", b"!!python/object:os.system ", b"!!int ", b"!!float ", b"!!str ", b"!!null x", b"!!set ",
    b"- ", b"? ", b": ", b"|\n", b">-\n", b"---\n", b"...\n", b"%YAML 1.1\n", b"{", b"}", b"[", b"]", b", ", b"#",
    b"\t", b"null", b"~", b".nan", b".inf", b"-.inf", b"1e999", b"-1", b"0x" + b"f" * 400, b"9" * 99, b"9" * 5000,
    b"1e-400", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b"\x1b[2J", "\u202e".encode(), "\u2028".encode(),
    b'"\\ud800"', b"kind: fsq", b"task: pixels", b"kind: residual", b"layer: ", b"levels: [8, 5]", b"depth: ",
    b"[" * 70, b"{a: " * 70, b"- " * 70,
)  # fmt: skip
OVERRIDES = (
    "data.sources[0].path=x",
    "model.image.quantizer={kind: fsq, levels: [8, 8]}",
    "model.image.quantizer.levels[1]=7",
    "model.text.quantizer.kind=lfq",
    "optim.lr=1e-4",
    "train.steps=100",
    "run.name=x",
    "evaluation[0].data.kind=scenes",
    "model.image.tower.args.depth=3",
    "loss.kind=sigmoid",
    "guards.spikes=null",
    "task=pixels",
    "losses[0].kind=l2",
    "detail.quantizer={kind: fsq, levels: [8]}",
)


def seeds() -> list[bytes]:
    """The project's own configurations, and those written out in full."""
    files = sorted(CONFIGS.glob("*.yaml"))
    full = [to_yaml(load_task_config(file)).encode() for file in files[:2]]
    return [_packed(text, []) for text in (*(file.read_bytes() for file in files), *full)]


def case(draw: random.Random, known: list[bytes]) -> bytes:
    """One input: a file, mutated more often than not, and up to three overrides."""
    texts = [json.loads(data)["yaml"].encode("latin-1") for data in known]
    text = draw.choice(texts)
    if draw.random() < 0.8:
        text = mutated(draw, text, texts, WORDS)
    overrides = []
    for _ in range(draw.randrange(4)):
        override = draw.choice(OVERRIDES).encode()
        if draw.random() < 0.7:
            override = mutated(draw, override, [other.encode() for other in OVERRIDES], WORDS)
        overrides.append(override.decode("utf-8", "replace"))
    return _packed(text, overrides)


def _packed(text: bytes, overrides: list[str]) -> bytes:
    return json.dumps({"yaml": text.decode("latin-1"), "overrides": overrides}).encode()


def check(data: bytes, folder: Path) -> str:
    """Read it; returns what happened in a word, raises anything that is no `ConfigError`, or a broken promise."""
    body = json.loads(data)
    path = folder / "case.yaml"
    path.write_bytes(body["yaml"].encode("latin-1"))
    try:
        config = load_task_config(path, body["overrides"])
    except ConfigError as error:
        message = str(error)
        assert message.replace("\n", "").isprintable(), ascii(message)
        assert len(message) < 1_000_000
        return "refused"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_task_config(path) == config
    return "read"
