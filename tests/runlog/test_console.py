import io
import logging
import warnings

import pytest
from tqdm import tqdm

from vqclip.runlog import console
from vqclip.runlog.bar import ProgressBar
from vqclip.runlog.console import fit_lines, log_to_stderr
from vqclip.runlog.health import CODED, read_codebooks

FIGURES = {"loss/total": 12.3456, "images_per_second": 12345.6, "data_wait": 0.27, "image/usage": 0.4}
FIGURES |= {"image/usage_if_uniform": 0.9, "image/tokens": 64.0, "image/perplexity": 30.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(bar, columns=80, **changes):
    return tqdm.format_meter(**{**bar._bar.format_dict, "ncols": columns, **changes})


def test_a_long_run_fits_80_columns(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with ProgressBar(100_000, 12_345, True, "a-run-with-a-long-name") as bar:
        bar.advance()
        bar.show(FIGURES)
        line = shown(bar, n=12_345, elapsed=1000.0, rate=20.0)
    assert line.startswith("a-run... 12345/100000 ")
    assert line.endswith("1:13:02 left, loss 12.346 12346 img/s wait 27% codes 44%")
    assert len(line) <= 80


def test_lines_of_a_log_say_the_same_in_more_words(monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    figures = {**FIGURES, "text/usage_if_uniform": 0.5, "text/0/usage": 0.4, "text/1/usage": 0.1, "text/usage": 0.25}
    figures |= dict.fromkeys(("text/tokens", "text/perplexity", "text/0/perplexity", "text/1/perplexity"), 9.0)
    with caplog.at_level("INFO"), ProgressBar(10, 5, True, "run") as bar:
        bar.advance()
        bar.show(figures)
    (line,) = caplog.messages
    assert line.startswith("step 6/10, loss 12.346, 12346 img/s, 27% waiting, codes 20% (text 1), ")
    assert line.endswith(" left")


def test_slow_steps_have_lines_before_their_first_report(monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with caplog.at_level("INFO"), ProgressBar(10, 0, True, "run") as bar:
        bar.advance()
        assert not caplog.messages
        bar._next_line = 0.0
        bar.advance()
    assert caplog.messages == ["step 2/10, 00:00 left"]


def test_codebooks_of_stages_count_and_the_means_of_a_stage_do_not():
    figures = {"image/usage": 0.1, "image/0/usage": 0.15, "image/0/0/usage": 0.2, "image/0/1/usage": 0.1}
    figures |= {"image/1/usage": 0.5, "image/0/usage_if_uniform": 0.4, "image/1/usage_if_uniform": 1.0, "loss/0/x": 1.0}
    figures |= dict.fromkeys(("image/tokens", *(name.replace("usage", "perplexity") for name in figures)), 9.0)
    found = read_codebooks(figures, dict.fromkeys(CODED, 0))
    assert [(each.name, each.share, each.number) for each in found] == [
        ("image/0/0", 0.5, "0/0"), ("image/0/1", 0.25, "0/1"), ("image/1", 0.5, "1")
    ]  # fmt: skip


WORDS = " ".join(["word"] * 30)


def test_only_vqclip_reports_and_its_lines_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (logging.getLogger(), logging.getLogger("vqclip")):
        monkeypatch.setattr(each, "level", each.level)
        monkeypatch.setattr(each, "handlers", [])
    monkeypatch.setattr(console, "columns", lambda: 60)
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with warnings.catch_warnings():
        log_to_stderr(lambda text: text.replace("secret", "..."))
        logging.getLogger("vqclip.data").info("secret: %s", WORDS)
        logging.getLogger("vqclip.data").warning("a warning")
        for name in ("aiobotocore.credentials", "azure.core", "another"):
            logging.getLogger(name).warning("a request")
        warnings.warn("torchao is old", stacklevel=1)
    first, *others, last = stderr.getvalue().splitlines()
    assert first[8:].startswith(" ...: word word")
    assert all(line.startswith(" " * 9 + "word") for line in others)
    assert max(map(len, (first, *others))) <= 60
    assert last[8:] == " warning: a warning"


def test_long_lines_are_broken_between_words_below_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "columns", lambda: 40)
    path = "/a/path/" + "x" * 60
    text = fit_lines(f"  speed       701 images/s on 2 processes, 1 %\nshort\n{path} is long, and {path}")
    speed = ["  speed       701 images/s on 2", "              processes, 1 %"]
    assert text.splitlines() == [*speed, "short", path, "  is long, and", f"  {path}"]
