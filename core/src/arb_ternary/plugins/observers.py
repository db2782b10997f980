"""The observers of one run: only what its config activated, called in the config's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from arb_ternary import hookspecs
from arb_ternary.errors import ArbError, ComponentError, nearest
from arb_ternary.plugins.loader import PluginFault, check_hooks, describe_exception, implementations
from arb_ternary.plugins.surface import OBSERVATION

if TYPE_CHECKING:
    from arb_ternary.backends.select import BackendRequest
    from arb_ternary_train.context import RunContext

__all__ = ["RunObservers"]


class RunObservers:
    """Calls the observer hooks of the objects that a run activated.

    An observer that raises ends the run with an error that names it; only at the end of a run are all of them called
    first. An :class:`ArbError` keeps its class and with it its exit code.

    Args:
        objects: observers by name, or observers alone, which are then called by their class.

    Raises:
        ComponentError: an object implements no observer hook, or one that is not called on a run.
    """

    def __init__(self, objects: Mapping[str, object] | Iterable[object] = ()) -> None:
        self._relay = pluggy.PluginManager("arb_ternary")
        self._relay.add_hookspecs(hookspecs)
        named = dict(objects) if isinstance(objects, Mapping) else _by_class(objects)
        self.names: tuple[str, ...] = tuple(named)
        # pluggy calls the last one registered first.
        for name, observer in reversed(named.items()):
            self._add(name, observer)

    def _add(self, name: str, observer: object) -> None:
        try:
            check_hooks(self._relay, observer)
        except PluginFault as fault:
            raise ComponentError(f"observer {name!r}: {fault.reason}") from fault
        for hook in implementations(self._relay, observer):
            if hook not in OBSERVATION:
                close = nearest(hook, OBSERVATION)
                hint = f"did you mean {close!r}?" if close else f"hooks of a run: {', '.join(OBSERVATION)}"
                raise ComponentError(f"observer {name!r}: {hook} is not called on the observers of a run", hint)
        try:
            self._relay.register(observer, name)
        except pluggy.PluginValidationError as error:
            raise ComponentError(f"observer {name!r}: {describe_exception(error)}") from error
        for hook in OBSERVATION:
            for implementation in getattr(self._relay.hook, hook).get_hookimpls():
                if implementation.wrapper or implementation.hookwrapper:
                    raise ComponentError(f"observer {name!r}: {hook} is a wrapper; observers are called one by one")

    def select_backend(self, request: BackendRequest, candidates: Sequence[str]) -> tuple[str, str] | None:
        """The first opinion on an ``auto`` backend: the observer's name and its choice among ``candidates``, or None.

        Raises:
            ComponentError: the choice is not one of the candidates.
        """
        for observer, implementation in self._calls("arb_select_backend"):
            choice = _call(
                observer, "arb_select_backend", implementation, request=request, candidates=tuple(candidates)
            )
            if choice is None:
                continue
            if choice not in candidates:
                raise ComponentError(
                    f"observer {observer!r}: arb_select_backend chose {choice!r}, which is not a candidate",
                    f"candidates: {', '.join(candidates)}",
                )
            return observer, str(choice)
        return None

    def run_start(self, context: RunContext) -> None:
        """The run is built and nothing has been computed yet."""
        self._each("arb_run_start", context=context)

    def phase_start(self, context: RunContext, phase: str) -> None:
        """The phase is about to run its next step."""
        self._each("arb_phase_start", context=context, phase=phase)

    def step_end(self, context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
        """One optimizer step has been taken."""
        self._each("arb_step_end", context=context, step=step, metrics=metrics)

    def eval_end(self, context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation has finished."""
        self._each("arb_eval_end", context=context, step=step, metrics=metrics)

    def checkpoint_save(self, context: RunContext, state: dict[str, Any]) -> None:
        """A checkpoint is about to be written; observers put their state into ``state``."""
        self._each("arb_checkpoint_save", context=context, state=state)

    def checkpoint_load(self, context: RunContext, state: Mapping[str, Any]) -> None:
        """A checkpoint has been read; ``state`` is what the observers had put there."""
        self._each("arb_checkpoint_load", context=context, state=state)

    def phase_end(self, context: RunContext, phase: str) -> None:
        """The phase has finished its last step."""
        self._each("arb_phase_end", context=context, phase=phase)

    def run_end(self, context: RunContext, status: str) -> None:
        """The run is over; every observer is called, whatever the others do.

        Raises:
            ComponentError: one or more of them failed; all are named.
        """
        failures: list[ArbError] = []
        for observer, implementation in self._calls("arb_run_end"):
            try:
                _call(observer, "arb_run_end", implementation, context=context, status=status)
            except ArbError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ComponentError("; ".join(failure.what for failure in failures)) from failures[0]

    def _calls(self, hook: str) -> list[tuple[str, Any]]:
        found = getattr(self._relay.hook, hook).get_hookimpls()
        return [(implementation.plugin_name, implementation) for implementation in reversed(found)]

    def _each(self, hook: str, **arguments: Any) -> None:
        for observer, implementation in self._calls(hook):
            _call(observer, hook, implementation, **arguments)


def _call(observer: str, hook: str, implementation: Any, **arguments: Any) -> Any:
    try:
        return implementation.function(*(arguments[name] for name in implementation.argnames))
    except ArbError as error:
        error.what = f"observer {observer!r}, {hook}: {error.what}"
        raise
    except Exception as error:
        raise ComponentError(f"observer {observer!r}, {hook}: {describe_exception(error)}") from error


def _by_class(objects: Iterable[object]) -> dict[str, object]:
    named: dict[str, object] = {}
    for observer in objects:
        name, number = type(observer).__name__, 2
        while name in named:
            name, number = f"{type(observer).__name__} ({number})", number + 1
        named[name] = observer
    return named
