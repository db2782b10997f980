"""The hooks that a run calls. The docstring of a hook is its reference.

They are called on the trackers that the run's config names, in its order, and on no plugin's own
module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arb_ternary.hookspecs import hookspec

if TYPE_CHECKING:
    from arb_ternary.backends.select import BackendRequest
    from arb_ternary.protocols.runs import RunContext


# --- selection: first result


@hookspec(firstresult=True)
def arb_select_backend(request: BackendRequest, candidates: Sequence[str]) -> str | None:
    """Choose among usable backends when the request is ``auto``.

    Called once per selection, on the observers of one run, and only for ``auto``: an explicit
    choice is never put to a vote. ``candidates`` are the usable names, best first. None means no
    opinion; the first candidate is then taken. A name outside ``candidates`` is an error.
    """


# --- observation


@hookspec
def arb_run_start(context: RunContext) -> None:
    """The run is built and nothing has been computed yet.

    Called once a process, after a resume too. Results are ignored.
    """


@hookspec
def arb_phase_start(context: RunContext, phase: str) -> None:
    """The phase is about to run its next step.

    Called once per phase and process. Results are ignored.
    """


@hookspec
def arb_step_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """One optimizer step has been taken and its metrics are known. Called at most once a step.
    Results are ignored.
    """


@hookspec
def arb_eval_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """An evaluation has finished. Called once an evaluation. Results are ignored."""


@hookspec
def arb_checkpoint_save(context: RunContext, state: dict[str, Any]) -> None:
    """A checkpoint is about to be written. An observer puts its own state under its own name into
    ``state``.

    Values are nested dicts and lists of tensors, numbers, strings, booleans and None. Called once a
    checkpoint. Results are ignored.
    """


@hookspec
def arb_checkpoint_load(context: RunContext, state: Mapping[str, Any]) -> None:
    """A checkpoint has been read; ``state`` is what the observers put there.

    Called once a resume. Results are ignored.
    """


@hookspec
def arb_phase_end(context: RunContext, phase: str) -> None:
    """The phase has finished its last step. Called once a phase. Results are ignored."""


@hookspec
def arb_run_end(context: RunContext, status: str) -> None:
    """The run is over: ``status`` is ``finished``, ``interrupted`` or ``failed``.

    Called once a process, on every observer, whatever the others do. Results are ignored.
    """
