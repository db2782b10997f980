"""Environment variables of OpenMP. Imports nothing heavy."""

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
    "make them sleep if nothing is set, since threads that spin (`active`) halve the speed as "
    "soon as another process wants a core",
)
#: More threads than processors have: a number that is mistyped makes OpenMP end the program.
MAX_THREADS: Final = 1024
VARIABLES: Final = (NUM_THREADS, WAIT_POLICY)


def wait_passively() -> None:
    """Make threads that wait sleep, unless the user says otherwise.

    It has no effect after torch is imported, which is when OpenMP reads the variable.
    """
    if "torch" not in sys.modules:
        WAIT_POLICY.set_default()
