"""Run the conformance kit on every backend of this repository.

    TRITON_INTERPRET=1 pytest tests/conformance

A backend that is not installed, or does not work on a device of this machine, is skipped with the
reason. Each backend's own tests run the kit too, so `make test` leaves this out.
"""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.backends.select import BackendRequest, select
from arb_ternary.errors import ArbError
from arb_ternary_testing import BackendSuite

BACKENDS = ("torch", "cpu", "triton", "tilelang")
DEVICES = ("cpu", "cuda")


def reason_against(backend: str, device: str) -> str | None:
    """Return why a backend cannot be tried on a device; None if it can."""
    try:
        select(BackendRequest(backend, "conformance", device))
    except ArbError as problem:
        return problem.what
    return None


def suite(backend: str, device: str) -> type[Any]:
    """Return the kit's tests of a backend on a device, or one skipped test if there is a reason."""
    body: dict[str, Any] = {
        "pytestmark": [pytest.mark.gpu if device == "cuda" else pytest.mark.extended]
    }
    name = f"Test{backend.title()}On{device.title()}"
    reason = reason_against(backend, device)
    if reason is not None:

        def test_every_op(self: Any) -> None:
            pytest.skip(reason)

        return type(name, (), body | {"test_every_op": test_every_op})
    return type(
        name,
        (BackendSuite,),
        body | {"component": backend, "device": device, "__module__": __name__},
    )


for _backend in BACKENDS:
    for _device in DEVICES:
        _suite = suite(_backend, _device)
        globals()[_suite.__name__] = _suite
del _suite


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_tried_or_says_why_not(backend: str) -> None:
    reasons = [reason_against(backend, device) for device in DEVICES]
    assert None in reasons or all(f"{backend!r}" in str(reason) for reason in reasons)
