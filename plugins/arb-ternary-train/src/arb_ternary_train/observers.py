"""The observers of one run, called by pluggy in the order of the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec

from arb_ternary import hookspecs
from arb_ternary.errors import ArbError, ComponentError, nearest
from arb_ternary.plugins.hooks import (
    REGISTRATION_PREFIX,
    HookManager,
    PluginFault,
    describe_exception,
)

if TYPE_CHECKING:
    from arb_ternary.backends.select import BackendRequest

P = ParamSpec("P")
#: The hooks of a run.
_HOOKS = tuple(hook.__name__ for hook in hookspecs.RUN_HOOKS)
#: The hook of plugins that registers nothing.
_NOT_OF_A_RUN = hookspecs.arb_plugin_info.__name__
#: The hook that is called on every observer, whatever the others do.
_LAST = hookspecs.arb_run_end.__name__


class RunObservers:
    """Calls the hooks of the objects that a run activated.

    An observer that raises ends the run with an error that names it; only ``arb_run_end`` is first
    called on all observers. An :class:`ArbError` keeps its class and so its exit code. A wrapper is
    called around all observers.

    Args:
        objects: observers by name.

    Raises:
        ComponentError: an object implements no observer hook, or one that is not called on a run.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._relay = HookManager(hookspecs.RUN_HOOKS)
        self._failures: list[ArbError] = []
        self._opinion: tuple[str, Any] | None = None
        self.names: tuple[str, ...] = tuple(objects)
        # pluggy calls the last one registered first.
        for name, observer in reversed(list(objects.items())):
            self._add(name, observer)

    def call(self, hook: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call a hook: ``observers.call(hookspecs.arb_step_end, context, step, metrics)``.

        Raises:
            ArbError: an observer failed; it is named. For ``arb_run_end`` all that failed are
                named.
        """
        self._failures = []
        self._opinion = None
        arguments = inspect.signature(hook).bind(*args, **kwargs).arguments
        try:
            result = getattr(self._relay.hook, hook.__name__)(**arguments)
        except ArbError:
            if hook.__name__ != _LAST:
                raise
        else:
            if hook.__name__ != _LAST or not self._failures:
                return result
        if len(self._failures) == 1:
            raise self._failures[0]
        raise ComponentError(
            "; ".join(failure.what for failure in self._failures)
        ) from self._failures[0]

    def select_backend(
        self, request: BackendRequest, candidates: Sequence[str]
    ) -> tuple[str, str] | None:
        """Return the first opinion on an ``auto`` backend: name of the observer and its choice.

        None if no observer has an opinion.

        Raises:
            ComponentError: the choice is not one of the candidates.
        """
        choice = self.call(hookspecs.arb_select_backend, request, tuple(candidates))
        if choice is None or self._opinion is None:
            return None
        observer = self._opinion[0]
        if choice not in candidates:
            raise ComponentError(
                f"observer {observer!r}: arb_select_backend chose {choice!r}, which is not a "
                f"candidate",
                f"candidates: {', '.join(candidates)}",
            )
        return observer, str(choice)

    def _add(self, name: str, observer: object) -> None:
        for hook in self._relay.implementations(observer):
            if hook.startswith(REGISTRATION_PREFIX) or hook == _NOT_OF_A_RUN:
                close = nearest(hook, _HOOKS)
                hint = (
                    f"did you mean {close!r}?" if close else f"hooks of a run: {', '.join(_HOOKS)}"
                )
                raise ComponentError(
                    f"observer {name!r}: {hook} is not called on the observers of a run", hint
                )
        try:
            self._relay.check(observer)
            guarded = SimpleNamespace()
            for attribute in dir(observer):
                options = self._relay.parse_hookimpl_opts(observer, attribute)
                if options is not None:
                    hook = options.get("specname") or attribute
                    setattr(
                        guarded, attribute, self._guard(name, hook, getattr(observer, attribute))
                    )
            self._relay.register(guarded, name)
        except PluginFault as fault:
            raise ComponentError(f"observer {name!r}: {fault.reason}") from fault

    def _guard(
        self, observer: str, hook: str, implementation: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap an implementation so that errors and opinions are attributed to its observer."""

        def note_opinion(result: Any) -> Any:
            # A wrapper that passes on what it was given has no opinion of its own.
            if result is not None and (self._opinion is None or self._opinion[1] != result):
                self._opinion = observer, result
            return result

        if inspect.isgeneratorfunction(implementation):

            @wraps(implementation)
            def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
                try:
                    return note_opinion((yield from implementation(*arguments)))
                except Exception as error:
                    # The error of another observer, on its way out.
                    if any(error is failure for failure in self._failures):
                        raise
                    failure = self._named(observer, hook, error)
                    raise failure from failure.__cause__

            return wrapper

        @wraps(implementation)
        def function(*arguments: Any) -> Any:
            try:
                return note_opinion(implementation(*arguments))
            except Exception as error:
                failure = self._named(observer, hook, error)
                if hook == _LAST:
                    # The other observers are called first.
                    return None
                raise failure from failure.__cause__

        return function

    def _named(self, observer: str, hook: str, error: Exception) -> ArbError:
        """Return the failure with its observer's name; an ArbError keeps its class."""
        failure = error
        if not isinstance(failure, ArbError):
            failure = ComponentError(describe_exception(error))
            failure.__cause__ = error
        failure.what = f"observer {observer!r}, {hook}: {failure.what}"
        self._failures.append(failure)
        return failure
