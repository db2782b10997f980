"""Which kernel backend a run uses, and why not another.

A request is ``auto``, a name, or names in order of preference. A name that the user wrote is kept
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

from attrs import asdict, frozen

from arb_ternary.backends.protocol import CORE_OPS, REQUIRED_OPS, KernelBackend, ProbeResult
from arb_ternary.environment import BACKEND
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.manager import Plugins, manager
from arb_ternary.specs import BackendSpec, resolve

AUTO: Final = "auto"

_log = logging.getLogger("arb_ternary.backends")


@frozen
class BackendRequest:
    """What was asked for: ``auto``, a name, or names separated by commas; where that was written;
    for which device.
    """

    value: str = AUTO
    source: str = "default"
    device: str = "cpu"


#: What may choose among usable names for ``auto``: it returns who chose and one of them, or None.
Opinion = Callable[[BackendRequest, Sequence[str]], tuple[str, str] | None]


@frozen
class Candidate:
    """A registered backend as seen from a device: its spec, and whether and why it can be used
    there.
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
    """The backend of a run, where the request for it was written, and why it is this one.

    ``rejected`` are the others that were considered, each with the reason; empty for a single name.
    """

    name: str
    source: str
    rejected: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def request_backend(
    *, command_line: str | None = None, config: str | None = None, device: str = "cpu"
) -> BackendRequest:
    """What is asked for on ``device``: the command line over ARB_TERNARY_BACKEND over the config
    over ``auto``.

    A value that is None or empty asks for nothing.
    """
    for source, value in (
        ("command line", command_line),
        (BACKEND.name, BACKEND.read()),
        ("config", config),
    ):
        if value is not None and value.strip():
            return BackendRequest(value, source, device)
    return BackendRequest(device=device)


# --- choosing


def candidates(device: str = "cpu") -> tuple[Candidate, ...]:
    """Every registered backend as seen from ``device``, the preferred ones first. Probes all of
    them.
    """
    found = [
        Candidate(
            registered.spec, registered.distribution, **asdict(_probe(registered.spec, device))
        )
        for registered in manager().registry.all("backend")
    ]
    return tuple(sorted(found, key=lambda one: (one.last_resort, -one.spec.priority, one.name)))


def select(request: BackendRequest, opinion: Opinion | None = None) -> Selection:
    """Decide on a backend; ``opinion`` is asked when the request is ``auto``.

    Raises:
        UsageProblem: a name is unknown (exit code 2).
        EnvironmentProblem: what was named is not installed or cannot work on the device; nothing
            can (exit code 3).
    """
    names = _parse(request)
    if names == (AUTO,):
        return _select_auto(request, opinion)
    for name in names:
        problem = _problem(name, request)
        # In a list, what is merely not installed is passed over.
        if problem is not None and (len(names) == 1 or isinstance(problem, UsageProblem)):
            raise problem
    rejected: list[tuple[str, str]] = []
    for name in names:
        result = _probe_named(name, request.device)
        if len(names) > 1:
            outcome = "" if result.usable else " rejected"
            _log.info(
                "backend %s%s on %s, from %s: %s",
                name,
                outcome,
                request.device,
                request.source,
                result.reason,
            )
        if result.usable:
            return Selection(name, request.source, tuple(rejected), result.reason)
        rejected.append((name, result.reason))
    usable = [candidate.name for candidate in candidates(request.device) if candidate.usable]
    reasons = "; ".join(
        f"backend {name!r} cannot be used on {request.device}: {reason}"
        for name, reason in rejected
    )
    raise EnvironmentProblem(
        f"{request.source}: {reasons}", f"usable on {request.device}: {', '.join(usable) or 'none'}"
    )


def _select_auto(request: BackendRequest, opinion: Opinion | None) -> Selection:
    found = candidates(request.device)
    usable = [candidate for candidate in found if candidate.usable]
    if not usable:
        reasons = "\n".join(f"{candidate.name}: {candidate.reason}" for candidate in found)
        raise EnvironmentProblem(
            f"no backend can be used on {request.device}", reasons or "none is registered"
        )
    best = usable[0]
    why = f"highest priority ({usable[0].spec.priority})"
    preferred = opinion(request, [candidate.name for candidate in usable]) if opinion else None
    if preferred is not None:
        observer, choice = preferred
        best = next(candidate for candidate in usable if candidate.name == choice)
        why = f"chosen by observer {observer!r}"
    rejected = tuple(
        (
            other.name,
            f"priority {other.spec.priority}"
            if other.usable and not other.last_resort
            else other.reason,
        )
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
    """Why no backend of that name is registered; None when one is."""
    registry = manager().registry
    if registry.find("backend", name) is not None:
        return None
    unusable = {one.name: one.reason for one in candidates(request.device) if not one.usable}
    problem = registry.problem("backend", name, unusable)
    return type(problem)(f"{request.source}: {problem.what}", problem.hint)


# --- probing


def serves(name: str, device: str) -> bool:
    """Whether the backend called ``name`` can work on a device (``cpu``, ``cuda``); its probe is
    asked once.
    """
    with _lock:
        return _serves(manager(), name, device)


@cache
def _serves(_plugins: Plugins, name: str, device: str) -> bool:
    return _probe_named(name, device).usable


def _probe_named(name: str, device: str) -> ProbeResult:
    registry = manager().registry
    registered = registry.find("backend", name)
    if registered is None:
        problem = registry.problem("backend", name)
        return ProbeResult(
            False, f"it {problem.what.removeprefix(f'backend {name!r} ')} ({problem.hint})"
        )
    return _probe(registered.spec, device)


def _probe(spec: BackendSpec, device: str) -> ProbeResult:
    """Ask a backend's probe; one that fails is a reason not to use the backend, never the end of
    the program.
    """
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
# What was built, probed and chosen is remembered for the plugins it came from: other plugins, other
# backends.

_innermost: ContextVar[str | None] = ContextVar("arb_ternary_backend", default=None)
_lock = threading.RLock()


def get_backend(name: str) -> KernelBackend:
    """The backend called ``name``, built on the first call.

    Raises:
        UsageProblem, EnvironmentProblem: it is not registered; it cannot be imported or built.
        ComponentError: what was built does not keep the protocol.
    """
    with _lock:
        return _build(manager(), name)


def current_backend(device: str = "cpu") -> str:
    """The backend of an op that names none: the innermost :func:`use_backend`, else
    ARB_TERNARY_BACKEND, else auto.

    What the variable says is resolved once for each value and device.
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
    """Use the backend called ``name`` for ops that name none, within a ``with`` block and in this
    thread only.

    Raises:
        UsageProblem, EnvironmentProblem: it is unknown, or cannot work on any device that it
            serves.
    """
    names = _parse(BackendRequest(name, "use_backend"))
    if len(names) != 1 or names == (AUTO,):
        raise UsageProblem(f"use_backend: {name!r} is not the name of one backend")
    registered = manager().registry.find("backend", names[0])
    devices = registered.spec.devices if registered else ()
    served = next((device for device in devices if _probe_named(names[0], device).usable), "cpu")
    selection = select(BackendRequest(name, "use_backend", served))
    token = _innermost.set(selection.name)
    try:
        yield selection.name
    finally:
        _innermost.reset(token)


def reset_backends() -> None:
    """Forget what was built, probed and chosen. For tests."""
    with _lock:
        for remembered in (_build, _choose, _serves):
            remembered.cache_clear()


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
    absent = [
        attribute
        for attribute in ("name", "capabilities", "kernels")
        if not hasattr(backend, attribute)
    ]
    if absent:
        raise ComponentError(f"{registered.described} lacks: {', '.join(absent)}")
    if backend.name != name:
        raise ComponentError(f"{registered.described} calls itself {backend.name!r}")
    lacking = [op for op in REQUIRED_OPS if op not in backend.kernels]
    if lacking:
        raise ComponentError(f"{registered.described} lacks required ops: {', '.join(lacking)}")
    for op in backend.kernels:
        if op not in CORE_OPS and "." not in op:
            close = nearest(op, CORE_OPS)
            hint = f"did you mean {close!r}?" if close else ""
            raise ComponentError(f"{registered.described} has an unknown op {op!r}", hint)
    return backend
