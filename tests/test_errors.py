import io
import logging

import pytest

from vqclip.errors import CheckpointError, DataError, VqclipError, printable
from vqclip.runlog.console import PrintableFormatter

HOSTILE = "a\x1b[2J\x9b31m\u202egnp.\u2066x\ud800\x00\x7f\u2028b\r"
SPELT = r"a\x1b[2J\x9b31m\u202egnp.\u2066x\ud800\x00\x7f\u2028b\r"


def test_what_steers_a_terminal_is_spelt_out() -> None:
    assert printable(HOSTILE) == SPELT
    assert printable("line\nline") == "line\nline"
    assert printable("line\nE vqclip: forged", one_line=True) == r"line\nE vqclip: forged"
    assert printable("père 图 😀") == "père 图 😀"


@pytest.mark.parametrize("kind", [VqclipError, DataError, CheckpointError])
def test_every_error_is_printable(kind: type[VqclipError]) -> None:
    assert str(kind(f"{HOSTILE}\nnext")) == f"{SPELT}\nnext"


def test_log_lines_are_printable() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname).1s: %(message)s"))
    logger = logging.Logger("of this test")
    logger.addHandler(handler)
    logger.warning("indexed %s", HOSTILE)
    assert stream.getvalue() == f"W: indexed {SPELT}\n"
