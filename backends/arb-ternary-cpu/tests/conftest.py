"""Another build of the extension module may be put to the same tests: ARB_NATIVE_BUILD names its
folder.

Without a C++ compiler the backend is not installed, which `make test` says, and nothing here is
collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("arb_ternary_cpu") is None:
    collect_ignore_glob = ["test_*.py"]

_build = os.environ.get("ARB_NATIVE_BUILD")
if _build:
    (_found,) = Path(_build).glob("_native.*.so")
    _spec = importlib.util.spec_from_file_location("arb_ternary_cpu._native", _found)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["arb_ternary_cpu._native"] = _module
    _spec.loader.exec_module(_module)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of torch until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def by_modules() -> Callable[[Any], Any]:
    """Gives a decoder's weights in a class that steps through its modules, which no kernel for
    whole tokens serves.
    """
    from arb_ternary_text.models.decoder import Decoder

    class Modules(Decoder):
        pass

    def made(model: Any) -> Any:
        other = Modules.__new__(Modules)
        other.__dict__ = model.__dict__
        return other

    return made
