"""Parts that the phases of a run add to the model: what its optimizer will have to train, known
before it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary.config.choice import PhaseChoice
from arb_ternary_train.protocols import AddsParts


def parts_added_by(phases: Sequence[PhaseChoice]) -> frozenset[str]:
    """Kinds of the parts that these phases, the last of a run, add to its model to be trained."""
    found: frozenset[str] = frozenset()
    for index, phase in enumerate(phases):
        if isinstance(phase.options, AddsParts):
            found |= phase.options.added_parts(followed=index < len(phases) - 1)
    return found
