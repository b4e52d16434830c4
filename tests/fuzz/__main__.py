"""Fuzz a reader: ``python -m tests.fuzz shards --seconds 600 --seed 0 --found FOLDER``.

Case n of a seed is always the same. Each may take ten seconds, and the process a gigabyte more than it has at the
start. Whatever breaks a rule is written to FOLDER as a file; put it into ``tests/fuzz/corpus/<reader>``, whose files
the default suite reads, and mend the reader. The last line of the output is JSON: cases, what became of them, what was
found.
"""

import argparse
import collections
import faulthandler
import json
import logging
import random
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import FrameType, ModuleType

from tests.fuzz import config, images, shards

READERS: dict[str, ModuleType] = {"shards": shards, "config": config, "images": images}
CASE_S = 10
EXTRA_MEMORY = 1 << 30


class Hang(BaseException):
    """A case takes longer than `CASE_S`; no handler of ordinary exceptions catches it."""


def fuzz(reader: ModuleType, seconds: float, cases: int, seed: int, found: Path) -> dict[str, object]:
    """Cases until the time is over, or so many."""
    known = reader.seeds()
    outcomes: collections.Counter[str] = collections.Counter()
    problems: dict[str, str] = {}
    end, number = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        for data in known:
            reader.check(data, Path(folder))  # the first use imports and allocates
        start_mb = peak_mb()
        limit = _mb("VmSize") * (1 << 20) + EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while number < cases if cases else time.monotonic() < end:
            data = reader.case(random.Random(f"{seed}-{number}"), known)
            (found / "current").write_bytes(data)  # what a dead process leaves
            faulthandler.dump_traceback_later(3 * CASE_S, exit=True)  # for what does not come back from C
            signal.alarm(CASE_S)
            try:
                outcomes[reader.check(data, Path(folder))] += 1
            except (Exception, Hang) as error:
                outcomes["found"] += 1
                what = f"{type(error).__name__}: {str(error)[:200]}"
                (found / f"{seed}-{number}").write_bytes(data)
                problems[f"{seed}-{number}"] = what
            finally:
                signal.alarm(0)
            number += 1
    faulthandler.cancel_dump_traceback_later()
    (found / "current").unlink()
    return {"cases": number, "outcomes": dict(outcomes), "found": problems, "grown_mb": peak_mb() - start_mb}


def peak_mb() -> float:
    """The most memory that the process has had so far, in MB."""
    return _mb("VmHWM")


def _mb(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) // 1024


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"longer than {CASE_S} s")


def main() -> int:
    """The command line; the exit status is 1 where something was found."""
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=0, help="so many, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--found", type=Path, required=True)
    options = parser.parse_args()
    options.found.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _hang)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    result = fuzz(READERS[options.reader], options.seconds, options.cases, options.seed, options.found)
    print(json.dumps(result))
    return 1 if result["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
