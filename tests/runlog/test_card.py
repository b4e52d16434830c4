from pathlib import Path

import pytest
import yaml

from tests.models import tiny_model
from vqclip.config import load_config
from vqclip.evaluation import Result
from vqclip.evaluation.encode import CodeUsage
from vqclip.train import TrainConfig
from vqclip.train.summary import RunSummary, model_card

USAGE = CodeUsage(
    codebook_sizes=[64], codes_used=[48], usage=[0.75], perplexity=[31.5], samples=10, tokens=40, tokens_per_sample=4.0,
    bits_used_per_token=4.98, bits_per_token=6.0, bits_per_sample=24.0,
)  # fmt: skip
RESULT = Result(
    name="unseen ```", kind="zero_shot", chance={"top1": 0.1}, samples=10, classes=10, captions=10,
    figures={"continuous": {"top1": 0.975}, "quantized": {"top1": 0.943}, "codes_only": {"top1": 0.942}},
    usage={"image": USAGE, "text": None},
)  # fmt: skip


@pytest.fixture
def config(tmp_path):
    tree = {
        "run": {"name": "mine", "seed": 7},
        "data": {"sources": [{"kind": "shards", "path": "https://me:secret@host/a.tar?signature=abc"}]},
        "model": tiny_model().model_dump(mode="json"),
        "loss": {"kind": "contrastive"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    return load_config(TrainConfig, tmp_path / "config.yaml")


def summary(results):
    return RunSummary(
        name="mine", coverage="72 samples shown in 2.40 epochs", samples=30, replaced=0, parameters={"image": 10**6},
        tokens={"image": 4}, codebook_sizes={"image": [64]}, bits_per_sample={"image": 24.0},
        speed={"images_per_second": 500.0, "data_wait": 0.1}, processes=2, results=results,
        folder="/home/me/runs/mine", checkpoint="/home/me/runs/mine/checkpoints/9", tokenizer="/home/me/tokenizer",
    )  # fmt: skip


def test_the_card_tells_what_was_measured_and_how_it_was_made(config):
    card = model_card(summary([RESULT]), config)
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "vqclip"
    assert "tokenizer" in str(yaml.safe_load(front)["tags"])
    assert "license" not in yaml.safe_load(front)
    for words in (
        *("97.5", "94.3", "94.2", "10.00"),  # three figures, and chance
        *(" 75.0 ", "31.5", "4.98 of 6.00", "24 bits"),  # usage and bits
        *("72 samples shown in 2.40 epochs", "kind: shards", "seed\n7"),
        "torchrun --nproc-per-node 2 -m vqclip.train --config config.yaml",
        'vqclip.load_tokenizer(folder, modality="image")',
    ):
        assert words in text
    assert "/home/me" not in text
    assert "secret" not in text
    assert "abc" not in text


def test_the_configuration_in_the_card_is_the_runs(config, tmp_path):
    """All but what an address must not tell; and no name in it ends a block of code."""
    card = model_card(summary([RESULT]), config)
    lines = card[card.index("--config config.yaml") :].splitlines()[2:]
    (tmp_path / "again.yaml").write_text("\n".join(line.removeprefix("    ") for line in lines) + "\n")
    again = load_config(TrainConfig, tmp_path / "again.yaml")
    assert again.model == config.model
    assert again.run == config.run
    assert str(again.data.sources[0].path) == "https://host/a.tar?..."
    assert [line for line in card.splitlines() if line.startswith("```")] == ["```python", "```"]


def test_the_card_tells_no_folder_of_this_machine_and_no_credentials(config):
    """Whatever the quoting and folding of YAML make of a value."""
    paths = (
        *("/home/me/data/local", "~/me/{00..03}.tar", "file:///home/me/b.tar", "{/home/me/c,/home/me/d}.tar"),
        "https://me:pa'SECRET1@host/a.tar?sig=SECRET2&x='SECRET3",
        f"https://me:{'SECRET4 ' * 30}@host/{'b ' * 60}.tar?sig=SECRET5".replace(" ", "\\"),
        "relative/e.tar",
    )
    source = config.data.sources[0].model_copy(update={"path": paths})
    data = config.data.model_copy(update={"sources": (source,)})
    run = config.run.model_copy(update={"folder": Path("/home/me/runs")})
    text = model_card(summary([RESULT]), config.model_copy(update={"data": data, "run": run}))
    for hidden in ("/home", "me/", "SECRET"):
        assert hidden not in text
    tree = yaml.safe_load("\n".join(line[4:] for line in text.partition("--config config.yaml\n")[2].splitlines()))
    *local, first, second, relative = tree["data"]["sources"][0]["path"]
    assert local == ["local", "{00..03}.tar", "b.tar", "d}.tar"]
    assert (first, relative) == ("https://host/a.tar?...", "relative/e.tar")
    assert second.startswith("https://host/b")
    assert tree["run"]["folder"] == "runs"


def test_a_card_without_figures_says_so(config):
    assert "No evaluation was configured" in model_card(summary([]), config)
