"""What a step frees stays with the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

#: Page faults of the fourth round of eight blocks of 16 MiB that are written and freed.
_PROGRAM = """
import ctypes, resource, sys
from arb_ternary_train.freed_memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(16 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc here"
)
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    assert faults("returned") > 10_000  # of 32,768 pages
    assert faults("kept") < 1_000
