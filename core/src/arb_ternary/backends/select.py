"""Select the kernel backend of a run.

A request is ``auto``, a name, or names in order of preference. A name that the user wrote is used
or is an error; only ``auto`` and a list choose.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Final

from attrs import frozen

from arb_ternary.backends.protocol import CORE_OPS, REQUIRED_OPS, KernelBackend, ProbeResult
from arb_ternary.environment import BACKEND
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.manager import Plugins, manager
from arb_ternary.plugins.record import Registered
from arb_ternary.specs import BackendSpec, resolve

AUTO: Final = "auto"

_log = logging.getLogger("arb_ternary.backends")


@frozen
class BackendRequest:
    """A request for a backend.

    Attributes:
        value: ``auto``, a name, or names separated by commas.
        source: where it was written.
        device: the device that the backend has to serve.
    """

    value: str = AUTO
    source: str = "default"
    device: str = "cpu"


#: A function that may choose among usable names for ``auto``: it returns the observer that chooses
#: and one of the names, or None.
Opinion = Callable[[BackendRequest, Sequence[str]], tuple[str, str] | None]


@frozen
class Candidate:
    """A registered backend, and whether and why it can be used on a device.

    ``last_resort`` is that of :class:`ProbeResult`.
    """

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
        name: the registered name.
        source: where the request for it was written.
        rejected: the others that were considered, each with the reason; empty for a single name.
        reason: why it is this one.
    """

    name: str
    source: str
    rejected: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def request_backend(
    *, command_line: str | None = None, config: str | None = None, device: str = "cpu"
) -> BackendRequest:
    """Return the request for a backend on ``device``.

    The command line comes first, then ARB_TERNARY_BACKEND, the config, and ``auto``. A value that
    is None or empty requests nothing.
    """
    sources = {"command line": command_line, BACKEND.name: BACKEND.read(), "config": config}
    for source, value in sources.items():
        if value is not None and value.strip():
            return BackendRequest(value, source, device)
    return BackendRequest(device=device)


# --- choosing


def candidates(device: str = "cpu") -> tuple[Candidate, ...]:
    """Probe every registered backend on ``device``; the preferred ones come first."""
    found = []
    for registered in manager().registry.all("backend"):
        result = _probe(registered.spec, device)
        found.append(
            Candidate(
                registered.spec,
                registered.distribution,
                result.usable,
                result.reason,
                result.last_resort,
            )
        )
    found.sort(key=lambda one: (one.last_resort, -one.spec.priority, one.name))
    return tuple(found)


def select(request: BackendRequest, opinion: Opinion | None = None) -> Selection:
    """Decide on a backend; ``opinion`` is asked if the request is ``auto``.

    Raises:
        UsageProblem: a name is unknown (exit code 2).
        EnvironmentProblem: a named backend is not installed or cannot work on the device, or no
            backend can (exit code 3).
    """
    names = requested_names(request)
    if names == (AUTO,):
        return _select_auto(request, opinion)
    is_list = len(names) > 1
    rejected: list[tuple[str, str]] = []
    for name in names:
        result = _probe_named(name, request.device)
        if is_list:
            shown = name if result.usable else f"{name} rejected"
            where = f"on {request.device}, from {request.source}"
            _log.info("backend %s %s: %s", shown, where, result.reason)
        if result.usable:
            return Selection(name, request.source, tuple(rejected), result.reason)
        rejected.append((name, result.reason))

    device = request.device
    reasons = [
        f"backend {name!r} cannot be used on {device}: {reason}" for name, reason in rejected
    ]
    usable = [candidate.name for candidate in candidates(device) if candidate.usable]
    raise EnvironmentProblem(
        f"{request.source}: {'; '.join(reasons)}",
        f"usable on {device}: {', '.join(usable) or 'none'}",
    )


def requested_names(request: BackendRequest) -> tuple[str, ...]:
    """Return the names in a request, ``(AUTO,)`` for an empty one.

    Raises:
        UsageProblem: a name is unknown, or empty.
        EnvironmentProblem: it is the only name, and not installed. In a list, a backend that is
            only not installed is passed over.
    """
    names = _parse(request)
    for name in names:
        problem = None if name == AUTO else _problem(name, request)
        if problem is not None and (len(names) == 1 or isinstance(problem, UsageProblem)):
            raise problem
    return names


def _select_auto(request: BackendRequest, opinion: Opinion | None) -> Selection:
    """Choose the usable backend with the highest priority, or that of the opinion."""
    found = candidates(request.device)
    usable = [candidate for candidate in found if candidate.usable]
    if not usable:
        reasons = "\n".join(f"{candidate.name}: {candidate.reason}" for candidate in found)
        raise EnvironmentProblem(
            f"no backend can be used on {request.device}", reasons or "none is registered"
        )

    best = usable[0]
    why = f"highest priority ({best.spec.priority})"
    preferred = None
    if opinion is not None:
        preferred = opinion(request, [candidate.name for candidate in usable])
    if preferred is not None:
        observer, choice = preferred
        best = next(candidate for candidate in usable if candidate.name == choice)
        why = f"chosen by observer {observer!r}"

    reason = f"{why}, {best.reason}"
    rejected = []
    for other in found:
        if other is not best:
            works = other.usable and not other.last_resort
            rejection = f"priority {other.spec.priority}" if works else other.reason
            rejected.append((other.name, rejection))
    _log.info("backend %s on %s, auto; why: arb backends explain", best.name, request.device)
    return Selection(best.name, request.source, tuple(rejected), reason)


def _parse(request: BackendRequest) -> tuple[str, ...]:
    """Return the names in a request, lower-case, each once; ``(AUTO,)`` for an empty request."""
    if not request.value.strip():
        return (AUTO,)
    parts = request.value.lower().split(",")
    names = tuple(dict.fromkeys(part.strip() for part in parts))
    if "" in names:
        raise UsageProblem(
            f"{request.source}: {request.value!r} has an empty name between its commas"
        )
    if AUTO in names and len(names) > 1:
        raise UsageProblem(
            f"{request.source}: {request.value!r} mixes 'auto' with names",
            "write 'auto' alone, or names alone",
        )
    return names


def _problem(name: str, request: BackendRequest) -> ArbError | None:
    """Return the error for a name that is not registered; None if it is."""
    registry = manager().registry
    if registry.find("backend", name) is not None:
        return None
    unusable = {one.name: one.reason for one in candidates(request.device) if not one.usable}
    problem = registry.problem("backend", name, unusable)
    return type(problem)(f"{request.source}: {problem.what}", problem.hint)


# --- probing


def serves(name: str, device: str) -> bool:
    """Whether a backend can work on a device (``cpu``, ``cuda``); its probe is called once."""
    with _lock:
        return _serves(manager(), name, device)


@cache
def _serves(_plugins: Plugins, name: str, device: str) -> bool:
    return _probe_named(name, device).usable


def _probe_named(name: str, device: str) -> ProbeResult:
    """Probe the backend of that name; one that is not registered is not usable."""
    registry = manager().registry
    registered = registry.find("backend", name)
    if registered is None:
        problem = registry.problem("backend", name)
        what = problem.what.removeprefix(f"backend {name!r} ")
        return ProbeResult(False, f"it {what} ({problem.hint})")
    return _probe(registered.spec, device)


def _probe(spec: BackendSpec, device: str) -> ProbeResult:
    """Call the probe of a backend. If it fails, the backend is not usable; nothing is raised."""
    if device.partition(":")[0] not in spec.devices:
        return ProbeResult(False, f"it serves {', '.join(spec.devices)}")
    try:
        result = resolve(spec.probe)(device)
    except Exception as error:
        return ProbeResult(False, f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(result, ProbeResult):
        return ProbeResult(False, f"its probe returned {result!r} instead of a ProbeResult")
    return result


# --- the backend in use
# Backends that were built, probed and chosen are cached for the plugins that they came from: if the
# plugins are loaded again, so are the backends.

_innermost: ContextVar[str | None] = ContextVar("arb_ternary_backend", default=None)
_lock = threading.RLock()


def get_backend(name: str) -> KernelBackend:
    """Return the backend called ``name``, which is built on the first call.

    Raises:
        UsageProblem, EnvironmentProblem: it is not registered, or cannot be imported or built.
        ComponentError: it does not keep the protocol.
    """
    with _lock:
        return _build(manager(), name)


def current_backend(device: str = "cpu") -> str:
    """Return the backend of an op that names none.

    It is that of the innermost :func:`use_backend`, else of ARB_TERNARY_BACKEND, else ``auto``. A
    value of the variable is resolved once per device.
    """
    innermost = _innermost.get()
    if innermost is not None:
        return innermost
    with _lock:
        return _choose(manager(), request_backend(device=device))


@cache
def _choose(_plugins: Plugins, request: BackendRequest) -> str:
    return select(request).name


@contextmanager
def use_backend(name: str) -> Iterator[str]:
    """Use the backend called ``name`` for ops that name none, in a ``with`` block of this thread.

    Raises:
        UsageProblem, EnvironmentProblem: it is unknown, or cannot work on any device that it
            serves.
    """
    names = _parse(BackendRequest(name, "use_backend"))
    if len(names) != 1 or names == (AUTO,):
        raise UsageProblem(f"use_backend: {name!r} is not the name of one backend")
    registered = manager().registry.find("backend", names[0])
    devices = registered.spec.devices if registered else ()
    served = "cpu"
    for device in devices:
        if _probe_named(names[0], device).usable:
            served = device
            break
    selection = select(BackendRequest(name, "use_backend", served))
    token = _innermost.set(selection.name)
    try:
        yield selection.name
    finally:
        _innermost.reset(token)


def reset_backends() -> None:
    """Forget the backends that were built, probed and chosen. For tests."""
    with _lock:
        for cached in (_build, _choose, _serves):
            cached.cache_clear()


@cache
def _build(plugins: Plugins, name: str) -> KernelBackend:
    registered = plugins.registry.get("backend", name)
    try:
        backend: KernelBackend = registered.load()()
    except ArbError:
        raise
    except Exception as error:
        raise EnvironmentProblem(
            f"{registered.described} cannot be built: {type(error).__name__}: {error}"
        ) from error
    _check(backend, registered)
    return backend


def _check(backend: KernelBackend, registered: Registered) -> None:
    """Refuse a backend that does not keep the protocol.

    Raises:
        ComponentError: it lacks an attribute or a required op, or has another name or unknown ops.
    """
    attributes = ("name", "capabilities", "kernels")
    absent = [attribute for attribute in attributes if not hasattr(backend, attribute)]
    if absent:
        raise ComponentError(f"{registered.described} lacks: {', '.join(absent)}")
    if backend.name != registered.name:
        raise ComponentError(f"{registered.described} calls itself {backend.name!r}")
    lacking = [op for op in REQUIRED_OPS if op not in backend.kernels]
    if lacking:
        raise ComponentError(f"{registered.described} lacks required ops: {', '.join(lacking)}")
    for op in backend.kernels:
        if op not in CORE_OPS and "." not in op:
            close = nearest(op, CORE_OPS)
            hint = f"did you mean {close!r}?" if close else ""
            raise ComponentError(f"{registered.described} has an unknown op {op!r}", hint)
