"""The hooks that a plugin or a tracker can implement. The docstring of a hook is its reference.

There are three groups:

* Registration hooks (``arb_register_...``) and ``arb_plugin_info`` are implemented by the hook
  module of a plugin. A registration hook is called once, without arguments, when the plugins are
  loaded. It must be pure and cheap: it imports no torch, reads no file and opens no connection. It
  returns a sequence; an empty sequence or None means that the plugin has nothing to register.
* ``arb_select_backend`` and the observer hooks (``arb_run_start`` ... ``arb_run_end``) are
  implemented by the trackers that the config of a run names. They are called on these trackers in
  the order of the config, and never on the module of a plugin.
* Hooks that other distributions add. A distribution specifies a registration hook of its own as a
  documented function in a module, marked with :data:`hookspec`, and returns that module from
  ``arb_register_hooks``. Other plugins then implement it like the hooks of this module, and ``arb
  plugins hooks`` lists it. The distribution reads what was registered with
  ``manager().registry.results(hook)``, or by name with ``manager().registry.by_name(hook)``.

A kind of component is a hook of this module whose results are specs (subclasses of ``Spec``). Specs
have names, lazy targets and options, and a config can name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from arb_ternary.backends.select import BackendRequest
    from arb_ternary.protocols.runs import RunContext
    from arb_ternary.specs import (
        BackendSpec,
        CheckSpec,
        CommandSpec,
        DataSpec,
        DocumentSpec,
        ExporterSpec,
        GeneratorSpec,
        ImporterSpec,
        MaskingSpec,
        ModelSpec,
        OptimizerSpec,
        PhaseSpec,
        PolicySpec,
        StarterSpec,
        TrackerSpec,
    )

#: Marks a function as the specification of a hook.
hookspec = pluggy.HookspecMarker("arb_ternary")


# --- registration


@hookspec
def arb_register_backends() -> Sequence[BackendSpec]:
    """Register kernel backends.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    backend.
    """
    return ()


@hookspec
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    """Register optimizers, for ternary modules or for float parameters.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    optimizer.
    """
    return ()


@hookspec
def arb_register_masking() -> Sequence[MaskingSpec]:
    """Register masking strategies, which make inputs and targets of a batch.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    masking strategy.
    """
    return ()


@hookspec
def arb_register_phases() -> Sequence[PhaseSpec]:
    """Register phases; a run is a list of them.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    phase.
    """
    return ()


@hookspec
def arb_register_models() -> Sequence[ModelSpec]:
    """Register models.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    model.
    """
    return ()


@hookspec
def arb_register_datasets() -> Sequence[DataSpec]:
    """Register data sources.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    data source.
    """
    return ()


@hookspec
def arb_register_trackers() -> Sequence[TrackerSpec]:
    """Register trackers, which observe a run through the observer hooks below.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    tracker.
    """
    return ()


@hookspec
def arb_register_exporters() -> Sequence[ExporterSpec]:
    """Register exporters, which write the model of a run in another format.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    exporter.
    """
    return ()


@hookspec
def arb_register_importers() -> Sequence[ImporterSpec]:
    """Register importers, which read a model that another program has written.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    importer.
    """
    return ()


@hookspec
def arb_register_generators() -> Sequence[GeneratorSpec]:
    """Register generators, the commands behind ``arb generate``.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    generator.
    """
    return ()


@hookspec
def arb_register_policies() -> Sequence[PolicySpec]:
    """Register step policies, which decide after each step how a training loop goes on.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    step policy.
    """
    return ()


@hookspec
def arb_register_checks() -> Sequence[CheckSpec]:
    """Register checks, which pass or fail a finished run.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    check.
    """
    return ()


@hookspec
def arb_register_starters() -> Sequence[StarterSpec]:
    """Register starter configs, the templates of ``arb config new``.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    starter config.
    """
    return ()


@hookspec
def arb_register_commands() -> Sequence[CommandSpec]:
    """Register commands and groups of commands of ``arb``.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    command.
    """
    return ()


@hookspec
def arb_register_documents() -> Sequence[DocumentSpec]:
    """Register kinds of config file, which ``arb config`` writes, shows and checks.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    kind of config file.
    """
    return ()


@hookspec
def arb_register_hooks() -> Sequence[ModuleType]:
    """Register hooks: modules in which the plugin specifies registration hooks of its own.

    Each module holds functions without arguments called ``arb_register_...``, marked with
    ``arb_ternary.hookspecs.hookspec``, whose docstrings say what a result means. A plugin that
    works without the distribution marks its implementation of such a hook with
    ``@hookimpl(optionalhook=True)``.

    Called once, when the plugins are loaded, before all other registration hooks, and on installed
    plugins only. None or an empty sequence means that the plugin adds no hook.
    """
    return ()


# --- information


@hookspec
def arb_plugin_info() -> Mapping[str, str]:
    """Return facts about the plugin by name, such as ``summary`` and ``homepage``.

    Called each time when the plugin is shown (``arb plugins show``), and never in a run. None means
    that the metadata of the distribution are all there is to show.
    """
    return {}


# --- selection, on the trackers of a run: the first result that is not None decides


@hookspec(firstresult=True)
def arb_select_backend(request: BackendRequest, candidates: Sequence[str]) -> str | None:
    """Choose among the usable backends when the request is ``auto``.

    ``candidates`` are the names of the usable backends, the preferred first. A result outside
    ``candidates`` is an error.

    Called once per selection, and only for ``auto``: an explicit choice stands. None means no
    opinion. If no tracker has one, the first candidate is taken.
    """


# --- observers, on the trackers of a run: results are ignored


@hookspec
def arb_run_start(context: RunContext) -> None:
    """Observe that the run is built and that nothing has been computed yet.

    Called once per process, after a resume too. The result is ignored.
    """


@hookspec
def arb_phase_start(context: RunContext, phase: str) -> None:
    """Observe that the phase is about to run its next step.

    Called once per phase and process. The result is ignored.
    """


@hookspec
def arb_step_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """Observe an optimizer step and its metrics.

    Called at most once per step. The result is ignored.
    """


@hookspec
def arb_eval_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
    """Observe the metrics of an evaluation.

    Called once per evaluation. The result is ignored.
    """


@hookspec
def arb_checkpoint_save(context: RunContext, state: dict[str, Any]) -> None:
    """Add to a checkpoint that is about to be written.

    The observer stores its own state under its own name in ``state``: nested dicts and lists of
    tensors, numbers, strings, booleans and None.

    Called once per checkpoint. The result is ignored.
    """


@hookspec
def arb_checkpoint_load(context: RunContext, state: Mapping[str, Any]) -> None:
    """Restore from a checkpoint that has been read; ``state`` is what the observers stored there.

    Called once per resume. The result is ignored.
    """


@hookspec
def arb_phase_end(context: RunContext, phase: str) -> None:
    """Observe that the phase has finished its last step.

    Called once per phase. The result is ignored.
    """


@hookspec
def arb_run_end(context: RunContext, status: str) -> None:
    """Observe the end of the run; ``status`` is ``finished``, ``interrupted`` or ``failed``.

    Called once per process on every observer, also if another observer fails. The result is
    ignored.
    """


#: The hooks of a run: trackers implement them, plugins do not.
RUN_HOOKS: Final[tuple[Callable[..., Any], ...]] = (
    arb_select_backend,
    arb_run_start,
    arb_phase_start,
    arb_step_end,
    arb_eval_end,
    arb_checkpoint_save,
    arb_checkpoint_load,
    arb_phase_end,
    arb_run_end,
)
