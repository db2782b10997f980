"""Guards around every test: one thread, fixed seeds, an unchanged environment, no network.

Also the choice of cases of tests that are marked ``sampled``.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# Workers share the cores, and threads that spin while they wait block the others. The variable is
# read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# A shell starts a job in the background with SIGINT ignored. Tests interrupt programs, and these
# inherit what the test process does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Both have the same number of examples, for the same time limit; continuous integration draws the
# same examples each time.
for _name in ("dev", "ci"):
    settings.register_profile(
        _name,
        deadline=None,
        max_examples=25,
        derandomize=_name == "ci",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Keep the kernels that TileLang compiles for tests in the checkout instead of the home folder.
os.environ.setdefault(
    "TILELANG_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "tilelang")
)

# Trackers write no run of a test anywhere else.
os.environ.setdefault("TRACKIO_DIR", str(Path(__file__).parent / ".pytest_cache" / "trackio"))
os.environ.setdefault("WANDB_MODE", "disabled")

_GPU = torch.cuda.is_available()

#: Variables that pytest and torch set while a test runs, and TileLang and scikit-learn when they
#: are imported.
_NOT_OURS = (
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "TL_CUTLASS_PATH",
    "TL_TEMPLATE_PATH",
    "TVM_LIBRARY_PATH",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the millions of collected objects from garbage collection: they stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a test that is marked ``sampled`` to `make test-all`.

    Those that stay cover the parameters: every value of every parameter occurs in one of them, for
    each value of the parameters that the marker names.
    """
    cases: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            values = _parameters(item)
            each = tuple(values.get(name) for name in marker.args)
            test = item.nodeid.partition("[")[0]
            cases[(test, *each)].append(item)
    for group in cases.values():
        kept = _covering(group)
        for item in group:
            if item not in kept:
                item.add_marker(pytest.mark.extended)


def _parameters(item: pytest.Item) -> dict[str, int]:
    """Return the identities of a case's parameters; cases share the objects."""
    call = getattr(item, "callspec", None)
    return {} if call is None else {name: id(value) for name, value in call.params.items()}


def _covering(cases: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return cases in which every value of every parameter occurs, the same in every session."""
    open_cases = {item: set(_parameters(item).items()) for item in cases}
    # Not in the order of the cases, in which neighbours differ in one parameter only.
    ordered = sorted(open_cases, key=lambda item: (crc32(item.nodeid.encode()), item.nodeid))
    kept: set[pytest.Item] = set()
    while True:
        best = max(ordered, key=lambda item: len(open_cases[item]))
        if kept and not open_cases[best]:
            return kept
        kept.add(best)
        covered = set(open_cases[best])
        for values in open_cases.values():
            values.difference_update(covered)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    # torch.manual_seed keeps a traceback for each kind of device that is missing, which takes half
    # a millisecond, and memory.
    (torch.manual_seed if _GPU else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Replace fsync: no test cuts the power, and a run of two steps would flush 22 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _the_environment_is_left_unchanged() -> Iterator[None]:
    before = _environment()
    yield
    assert _environment() == before, "a test changed the environment; use monkeypatch"


@pytest.fixture(autouse=True)
def _no_test_reaches_the_network() -> Iterator[None]:
    connect = socket.socket.connect
    connect_ex = socket.socket.connect_ex

    def guarded(self: socket.socket, address: Any) -> None:
        _refuse_network(self, address)
        connect(self, address)

    def guarded_ex(self: socket.socket, address: Any) -> int:
        _refuse_network(self, address)
        return connect_ex(self, address)

    # Not the test's own monkeypatch, which is undone only after the guard of the environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        patch.setattr(socket.socket, "connect_ex", guarded_ex)
        yield


def _refuse_network(connection: socket.socket, address: Any) -> None:
    if connection.family != socket.AF_UNIX:
        pytest.fail(f"a test tried to connect to {address!r}; tests use no network")


def _environment() -> dict[str, str]:
    # TileLang also puts a folder of its own in front of PYTHONPATH.
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_OURS and not (name == "PYTHONPATH" and "tilelang" in value)
    }
