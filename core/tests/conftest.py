"""Guards around every test of core: one thread, known seeds, nothing left behind in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _the_environment_is_left_unchanged() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    before.pop("PYTEST_CURRENT_TEST", None)
    after.pop("PYTEST_CURRENT_TEST", None)
    assert after == before, "a test changed the environment; use monkeypatch"
