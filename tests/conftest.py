"""Fixtures shared by all tests.

`ranks` runs a function on real gloo processes, started once per session:

    def gathered_sum(x):                       # top level of the test module: it is sent to the ranks by name
        return dist.all_gather(x + dist.rank()).sum()

    def test_gather(ranks):
        results = ranks(2, gathered_sum, torch.ones(3))      # one result per rank, in rank order
        assert results[0] == results[1] == 9

- `ranks(world_size, fn, *args, init=True, timeout=120.0)`, world size 1 to 4; all ranks get the same arguments, and
  pick their share by `dist.rank()`. Arguments and results are pickled (tensors are copied).
- The process group is formed before `fn` and taken down after it; with `init=False` the function finds torchrun's
  environment variables only. Each rank starts with `torch.manual_seed(0)` and one thread.
- The processes start with the first test that needs them and serve all others; `make test` shares the files of tests
  out among two processes, each of which has such a pool.
- A failing rank raises `tests.ranks.RankError` with its traceback in the test; `error.value.results` holds what the
  other ranks returned. A rank that dies or hangs costs a restart of the pool, never a hang of pytest.
- The test folders are packages (each has an `__init__.py`), so modules in different folders may share a name.
"""

import faulthandler
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.data.making import caption_shards
from tests.ranks import RankPool
from vqclip.runlog import console

console.columns = lambda: 10_000
"""Messages are one line, which tests search."""
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
"""As the ranks have, by all commands that start pytest: sums on several threads differ in their last bits."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Run a function on 1 to 4 gloo ranks; see the top of this file."""
    torch.set_num_threads(1)
    pool = RankPool()
    yield pool
    pool.kill()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with 30 captioned images."""
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[int], str]:
    """Return the message of a command that has ended with this status, which is that of a mistake."""

    def message(status: int) -> str:
        assert status == 2
        return capsys.readouterr().err

    return message


_LONGEST = (
    "quantizers/test_contract.py",
    "quantizers/test_training.py",
    "train/test_main.py",
    "train/test_feature_cache.py",
    "train/test_grad_cache.py",
    "train/test_resume.py",
    "train/test_frozen_weights.py",
    "export/test_export.py",
)
"""Files that take longest begin first, so that two processes end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the order is otherwise unchanged."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_LONGEST))


def pytest_unconfigure() -> None:
    """Say where the process hangs should it not end within two minutes, and end it: no wait is without a limit."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape names that are not UTF-8 in captured output, which pytest-xdist could not send."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
