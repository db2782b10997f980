"""Which kernel backend a run uses, and why not another.

A request is ``auto``, a name, or names in order of preference. A name that the user wrote is kept or is an error; only
``auto`` and a list choose.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from attrs import field, frozen

from arb_ternary.backends.protocol import OPTIONAL_OPS, REQUIRED_OPS, KernelBackend, ProbeResult
from arb_ternary.environment import BACKEND
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.manager import Plugins, manager
from arb_ternary.plugins.missing import not_installed
from arb_ternary.specs import BackendSpec, resolve

__all__ = [
    "AUTO",
    "BackendRequest",
    "Candidate",
    "Opinion",
    "Selection",
    "candidates",
    "current_backend",
    "get_backend",
    "request_backend",
    "reset_backends",
    "select",
    "serves",
    "use_backend",
]

AUTO: Final = "auto"

_log = logging.getLogger("arb_ternary.backends")


@frozen
class BackendRequest:
    """What was asked for: ``auto``, a name, or names separated by commas; where that was written; for which device."""

    value: str = AUTO
    source: str = "default"
    device: str = "cpu"


#: What may choose among usable names for ``auto``: it returns who chose and one of them, or None.
Opinion = Callable[[BackendRequest, Sequence[str]], tuple[str, str] | None]


@frozen
class Candidate:
    """A registered backend as seen from a device: its spec, and whether and why it can be used there."""

    spec: BackendSpec
    distribution: str | None
    usable: bool
    reason: str
    last_resort: bool = False

    @property
    def name(self) -> str:
        """The registered name."""
        return self.spec.name


@frozen
class Selection:
    """The backend of a run.

    Attributes:
        name: the backend.
        source: where the request was written: the command line, ARB_TERNARY_BACKEND, the config, or ``default``.
        rejected: the others that were considered, each with the reason; empty for a single name.
        reason: why this one.
    """

    name: str
    source: str
    rejected: tuple[tuple[str, str], ...] = field(default=())
    reason: str = ""


def request_backend(
    *, command_line: str | None = None, config: str | None = None, device: str = "cpu"
) -> BackendRequest:
    """What is asked for on ``device``: the command line over ARB_TERNARY_BACKEND over the config over ``auto``.

    A value that is None or empty asks for nothing.
    """
    for source, value in (("command line", command_line), (BACKEND.name, BACKEND.read()), ("config", config)):
        if value is not None and value.strip():
            return BackendRequest(value, source, device)
    return BackendRequest(device=device)


# --- choosing --------------------------------------------------------------------------------------------------------


def candidates(device: str = "cpu") -> tuple[Candidate, ...]:
    """Every registered backend as seen from ``device``, the preferred ones first. Probes all of them."""
    found = []
    for registered in manager().registry.all("backend"):
        spec = _backend_spec(registered.spec)
        result = _probe(spec, device)
        found.append(Candidate(spec, registered.distribution, result.usable, result.reason, result.last_resort))
    return tuple(sorted(found, key=lambda one: (one.last_resort, -one.spec.priority, one.name)))


def select(request: BackendRequest, opinion: Opinion | None = None) -> Selection:
    """Decide on a backend.

    Args:
        request: what was asked for.
        opinion: asked when the request is ``auto``.

    Raises:
        UsageProblem: a name is unknown (exit code 2).
        EnvironmentProblem: what was named is not installed or cannot work on the device; nothing can (exit code 3).
    """
    names = _parse(request)
    if names == (AUTO,):
        return _select_auto(request, opinion)
    rejected: list[tuple[str, str]] = []
    for name in names:
        _check_exists(name, request)
    for name in names:
        result = _probe_named(name, request.device)
        if result.usable:
            selection = Selection(name, request.source, tuple(rejected), result.reason)
            if len(names) > 1:
                _log.info("backend %s on %s, from %s: %s", name, request.device, request.source, result.reason)
            return selection
        rejected.append((name, result.reason))
        if len(names) > 1:
            _log.info("backend %s rejected on %s, from %s: %s", name, request.device, request.source, result.reason)
    if len(rejected) == 1 and manager().registry.find("backend", names[0]) is None:
        raise _located(_lookup_error(names[0]), request)
    usable = [candidate.name for candidate in candidates(request.device) if candidate.usable]
    reasons = "; ".join(f"backend {name!r} cannot be used on {request.device}: {reason}" for name, reason in rejected)
    raise EnvironmentProblem(
        f"{request.source}: {reasons}", f"usable on {request.device}: {', '.join(usable) or 'none'}"
    )


def _select_auto(request: BackendRequest, opinion: Opinion | None) -> Selection:
    found = candidates(request.device)
    usable = [candidate for candidate in found if candidate.usable]
    if not usable:
        reasons = "\n".join(f"{candidate.name}: {candidate.reason}" for candidate in found)
        raise EnvironmentProblem(f"no backend can be used on {request.device}", reasons or "none is registered")
    best, why = usable[0], f"highest priority ({usable[0].spec.priority})"
    preferred = opinion(request, [candidate.name for candidate in usable]) if opinion else None
    if preferred is not None:
        observer, choice = preferred
        best = next(candidate for candidate in usable if candidate.name == choice)
        why = f"chosen by observer {observer!r}"
    rejected = tuple(
        (other.name, f"priority {other.spec.priority}" if other.usable and not other.last_resort else other.reason)
        for other in found
        if other is not best
    )
    reason = f"{why}, {best.reason}"
    others = "".join(f"; not {name}: {rejection}" for name, rejection in rejected)
    _log.info("backend %s on %s, auto: %s%s", best.name, request.device, reason, others)
    return Selection(best.name, request.source, rejected, reason)


def _parse(request: BackendRequest) -> tuple[str, ...]:
    """The names in a request, in order, lower-case, each once; ``(AUTO,)`` for an empty one."""
    if not request.value.strip():
        return (AUTO,)
    names = tuple(dict.fromkeys(part.strip().lower() for part in request.value.split(",")))
    if "" in names:
        raise UsageProblem(f"{request.source}: {request.value!r} has an empty name between its commas")
    if AUTO in names and len(names) > 1:
        raise UsageProblem(
            f"{request.source}: {request.value!r} mixes 'auto' with names", "write 'auto' alone, or names alone"
        )
    return names


def _check_exists(name: str, request: BackendRequest) -> None:
    """Refuse a name that neither is registered nor has a known reason for not being there."""
    if manager().registry.find("backend", name) is None:
        error = _lookup_error(name)
        if isinstance(error, UsageProblem):
            raise _unknown(name, request)


def _lookup_error(name: str) -> ArbError:
    try:
        manager().registry.get("backend", name)
    except ArbError as error:
        return error
    raise AssertionError(f"backend {name!r} is registered")


def _located(error: ArbError, request: BackendRequest) -> ArbError:
    return type(error)(f"{request.source}: {error.what}", error.hint)


def _unknown(name: str, request: BackendRequest) -> UsageProblem:
    found = candidates(request.device)
    absent = not_installed("backend", manager().records)
    close = nearest(name, [*(candidate.name for candidate in found), *absent])
    usable = ", ".join(candidate.name for candidate in found if candidate.usable)
    hint = [f"did you mean {close!r}?"] if close else []
    hint.append(f"available: {usable or 'none'}")
    hint.extend(f"unavailable: {candidate.name} ({candidate.reason})" for candidate in found if not candidate.usable)
    hint.extend(f"not installed: {known} (pip install {absent[known]})" for known in absent)
    return UsageProblem(f"{request.source}: no backend is called {name!r}", "\n".join(hint))


def serves(name: str, device: str) -> bool:
    """Whether the backend called ``name`` can work on a device (``cpu``, ``cuda``); its probe is asked once."""
    with _lock:
        _follow_plugins()
        if (name, device) not in _served:
            _served[name, device] = _probe_named(name, device).usable
        return _served[name, device]


# --- probing ---------------------------------------------------------------------------------------------------------


def _probe_named(name: str, device: str) -> ProbeResult:
    registered = manager().registry.find("backend", name)
    if registered is None:
        error = _lookup_error(name)
        reason = f"it {error.what.removeprefix(f'backend {name!r} ')}"
        return ProbeResult(False, f"{reason} ({error.hint})")
    return _probe(_backend_spec(registered.spec), device)


def _probe(spec: BackendSpec, device: str) -> ProbeResult:
    """Ask a backend's probe; one that fails is a reason not to use the backend, never the end of the program."""
    if device.partition(":")[0] not in spec.devices:
        return ProbeResult(False, f"it serves {', '.join(spec.devices)}")
    try:
        result = resolve(spec.probe)(device)
    except Exception as error:
        return ProbeResult(False, f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(result, ProbeResult):
        return ProbeResult(False, f"its probe returned {result!r} instead of a ProbeResult")
    return result


def _backend_spec(spec: object) -> BackendSpec:
    assert isinstance(spec, BackendSpec)  # the loader checked what the hook returned
    return spec


# --- the backend in use ----------------------------------------------------------------------------------------------

_innermost: ContextVar[str | None] = ContextVar("arb_ternary_backend", default=None)
_lock = threading.RLock()
#: What was built and chosen, and the plugins it came from: other plugins, other backends.
_plugins: Plugins | None = None
_built: dict[str, KernelBackend] = {}
_chosen: dict[tuple[str, str], str] = {}
_served: dict[tuple[str, str], bool] = {}


def get_backend(name: str) -> KernelBackend:
    """The backend called ``name``, built on the first call.

    Raises:
        UsageProblem, EnvironmentProblem: it is not registered; it cannot be imported or built.
        ComponentError: what was built does not keep the protocol.
    """
    with _lock:
        _follow_plugins()
        if name not in _built:
            _built[name] = _build(name)
        return _built[name]


def current_backend(device: str = "cpu") -> str:
    """The backend of an op that names none: the innermost :func:`use_backend`, else ARB_TERNARY_BACKEND, else auto.

    What the variable says is resolved once for each value and device.
    """
    innermost = _innermost.get()
    if innermost is not None:
        return innermost
    request = request_backend(device=device)
    with _lock:
        _follow_plugins()
        key = (request.value, device)
        if key not in _chosen:
            _chosen[key] = select(request).name
        return _chosen[key]


@contextmanager
def use_backend(name: str) -> Iterator[str]:
    """Use the backend called ``name`` for ops that name none, within a ``with`` block and in this thread only.

    Raises:
        UsageProblem, EnvironmentProblem: it is unknown, or cannot work on any device that it serves.
    """
    request = BackendRequest(name, "use_backend")
    names = _parse(request)
    if len(names) != 1 or names == (AUTO,):
        raise UsageProblem(f"use_backend: {name!r} is not the name of one backend")
    registered = manager().registry.find("backend", names[0])
    devices = _backend_spec(registered.spec).devices if registered else ()
    served = next((device for device in devices if _probe_named(names[0], device).usable), "cpu")
    selection = select(BackendRequest(name, "use_backend", served))
    token = _innermost.set(selection.name)
    try:
        yield selection.name
    finally:
        _innermost.reset(token)


def reset_backends() -> None:
    """Forget what was built and chosen. For tests."""
    with _lock:
        _built.clear()
        _chosen.clear()
        _served.clear()


def _follow_plugins() -> None:
    global _plugins  # noqa: PLW0603
    plugins = manager()
    if _plugins is not plugins:
        reset_backends()
        _plugins = plugins


def _build(name: str) -> KernelBackend:
    registered = manager().registry.get("backend", name)
    described = f"backend {name!r} of plugin {manager().registry.record_of(registered).described}"
    try:
        backend = registered.load()()
    except ArbError:
        raise
    except Exception as error:
        raise EnvironmentProblem(f"{described} cannot be built: {type(error).__name__}: {error}") from error
    absent = [attribute for attribute in ("name", "capabilities", "kernels") if not hasattr(backend, attribute)]
    if absent:
        raise ComponentError(f"{described} lacks: {', '.join(absent)}")
    if backend.name != name:
        raise ComponentError(f"{described} calls itself {backend.name!r}")
    lacking = [op for op in REQUIRED_OPS if op not in backend.kernels]
    if lacking:
        raise ComponentError(f"{described} lacks required ops: {', '.join(lacking)}")
    for op in _foreign(backend.kernels):
        close = nearest(op, (*REQUIRED_OPS, *OPTIONAL_OPS))
        raise ComponentError(f"{described} has an unknown op {op!r}", f"did you mean {close!r}?" if close else "")
    built: KernelBackend = backend
    return built


def _foreign(ops: Iterable[str]) -> list[str]:
    return [op for op in ops if op not in REQUIRED_OPS and op not in OPTIONAL_OPS]
