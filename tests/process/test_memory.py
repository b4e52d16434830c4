import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from vqclip.process.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):  # glibc's bins settle
    torch.ones(2**24)
before = faults()
for _ in range(8):
    torch.ones(2**24)
print(faults() - before)
"""


def faults_of_eight_blocks(keep, **environment):
    """How many pages the system hands out for 8 blocks of 64 MiB, one after the other."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS.format(keep=keep)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


GLIBC = tuple(map(int, platform.libc_ver()[1].split("."))) if platform.libc_ver()[0] == "glibc" else ()
pytestmark = pytest.mark.skipif(GLIBC < (2, 35), reason="before glibc 2.35, blocks of 64 MiB cannot be kept")


@pytest.mark.slow
def test_freed_memory_is_used_again():
    huge_pages = 8 * 2**26 // 2**21
    assert faults_of_eight_blocks(keep=True) < huge_pages / 2
    assert faults_of_eight_blocks(keep=False) >= huge_pages


@pytest.mark.slow
def test_the_environment_is_heeded():
    given = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    assert faults_of_eight_blocks(keep=True, **given) >= 8 * 2**26 // 2**21
