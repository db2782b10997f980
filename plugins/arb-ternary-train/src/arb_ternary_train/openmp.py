"""What OpenMP reads from the environment, and what the program tells it there. Imports nothing
heavy.
"""

from __future__ import annotations

import sys
from typing import Final

from arb_ternary.environment import Variable

NUM_THREADS: Final = Variable(
    "OMP_NUM_THREADS",
    "",
    "OpenMP's own number of threads; a run with `threads: auto` takes it as it is",
)
WAIT_POLICY: Final = Variable(
    "OMP_WAIT_POLICY",
    "passive",
    "OpenMP's own: how threads wait for each other; `arb train`, `arb eval` and `arb generate` "
    "make them sleep where nothing is set, since threads that spin (`active`) halve the speed as "
    "soon as another process wants a core",
)
VARIABLES: Final = (NUM_THREADS, WAIT_POLICY)


def wait_passively() -> None:
    """Have threads that wait sleep, unless the user says otherwise. OpenMP looks once, when torch
    is imported.
    """
    if "torch" not in sys.modules:
        WAIT_POLICY.set_default()
