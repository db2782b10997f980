"""Every hook that the program calls. The docstring of a hook is its reference.

Registration hooks are called once, when the plugins are loaded, and must be pure and cheap: no torch, no file, no
network. Observer hooks are called on a manager of one run, which holds only what that run's config activated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from arb_ternary.specs import (
    BackendSpec,
    CheckSpec,
    CommandSpec,
    DataSpec,
    DocumentSpec,
    ExporterSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    RecipeSpec,
    StarterSpec,
    TrackerSpec,
)

if TYPE_CHECKING:
    from arb_ternary.backends.select import BackendRequest
    from arb_ternary_train.context import RunContext

hookspec = pluggy.HookspecMarker("arb_ternary")


# --- registration: once, at load -------------------------------------------------------------------------------------


@hookspec
def arb_register_backends() -> Sequence[BackendSpec]:
    """Kernel backends. Called once at load; an empty sequence or None means that the plugin has none."""
    return ()


@hookspec
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    """Optimizers and optimizer wrappers. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_masking() -> Sequence[MaskingSpec]:
    """Masking strategies. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_phases() -> Sequence[PhaseSpec]:
    """Trainer phases. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_models() -> Sequence[ModelSpec]:
    """Models. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_datasets() -> Sequence[DataSpec]:
    """Data sources. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_trackers() -> Sequence[TrackerSpec]:
    """Observers of runs. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_exporters() -> Sequence[ExporterSpec]:
    """Exporters. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_commands() -> Sequence[CommandSpec]:
    """Commands of ``arb``. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_checks() -> Sequence[CheckSpec]:
    """Checks of finished runs. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_recipes() -> Sequence[RecipeSpec]:
    """Recipes of the quality bench. Called once at load; an empty sequence or None means none. Since interface 1.1."""
    return ()


@hookspec
def arb_register_documents() -> Sequence[DocumentSpec]:
    """Kinds of config files. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_register_starters() -> Sequence[StarterSpec]:
    """Configs to start from. Called once at load; an empty sequence or None means none."""
    return ()


@hookspec
def arb_plugin_info() -> Mapping[str, str]:
    """Facts about the plugin for ``arb plugins show`` (``summary``, ``homepage``, ...).

    Called when a plugin is shown, never in a run. None means that the distribution's metadata says it all.
    """
    return {}


# --- selection: first result -----------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def arb_select_backend(request: BackendRequest, candidates: Sequence[str]) -> str | None:
    """Choose among usable backends when the request is ``auto``.

    Called once per selection, on the observers of one run, and only for ``auto``: an explicit choice is never put to
    a vote. ``candidates`` are the usable names, best first. None means no opinion; the first candidate is then taken.
    A name outside ``candidates`` is an error.
    """


# --- observers: per run, only what the config activated --------------------------------------------------------------


@hookspec
def arb_run_start(context: RunContext) -> None:
    """The run is built and nothing has been computed yet.

    Called once a process, after a resume too. Results are ignored.
    """


@hookspec
def arb_phase_start(context: RunContext, phase: str) -> None:
    """The phase is about to run its next step. Called once a phase and process. Results are ignored."""


@hookspec
def arb_step_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """One optimizer step has been taken and its metrics are known. Called at most once a step. Results are ignored."""


@hookspec
def arb_eval_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """An evaluation has finished. Called once an evaluation. Results are ignored."""


@hookspec
def arb_checkpoint_save(context: RunContext, state: dict[str, Any]) -> None:
    """A checkpoint is about to be written. An observer puts its own state under its own name into ``state``.

    Values are nested dicts and lists of tensors, numbers, strings, booleans and None. Called once a checkpoint.
    Results are ignored.
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

    Called once a process. Results are ignored.
    """
