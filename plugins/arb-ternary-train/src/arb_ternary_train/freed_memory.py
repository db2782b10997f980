"""Memory that a training step frees. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import sys


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees for the next one.

    It would return most of it to the system, which clears and maps the pages anew in every step.
    Nothing changes without glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_TRIM_THRESHOLD: free bytes at the end of the heap that are returned.
        mallopt(-1, 2**31 - 1)
        # M_MMAP_THRESHOLD: bytes of a block that is mapped alone and returned when it is freed, at
        # most 32 MiB.
        mallopt(-3, 2**25)
