"""``arb backends roofline``: whose kernel an op is, what was measured of it, and the least time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from arb_ternary.backends.select import reset_backends
from arb_ternary.cli.main import main
from arb_ternary.plugins.manager import reset_manager
from arb_ternary_testing import install_fake_plugin


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    before = set(sys.modules)
    yield
    # Other tests have fakes of the same names.
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]
    reset_manager()
    reset_backends()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(("backends", "roofline", *arguments)) == 0
    return capsys.readouterr().out


def test_the_kernel_of_an_op_without_a_model_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("pack", "1,4096,4096", "--backend", "torch")
    assert json.loads(printed(capsys, *arguments, "--json")) == {
        "op": "pack",
        "shape": {"M": 1, "N": 4096, "K": 4096, "G": 128},
        "kernel_of": "torch",
        "operands": "int8",
        "measured": {},
        "roofline": None,
    }
    text = printed(capsys, *arguments)
    assert text.startswith("pack, M = 1, N = 4096, K = 4096, G = 128: kernel of torch\n")
    assert "no model of pack; there are models of " in text


def test_roofline_states_bytes_operations_and_floors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("linear", "1,4096,4096", "--backend", "torch")
    least = json.loads(printed(capsys, *arguments, "--json"))["roofline"]
    assert (least["bytes"], least["operations"], least["compiled"]) == (4337668, 33554432, None)
    assert [(row["gpu"], row["floor_us"], row["bound"]) for row in least["gpus"]] == [
        ("H100", 1.295, "memory"),
        ("H200", 0.904, "memory"),
    ]
    assert "at least  4337668 bytes, 33554432 operations (int8)\n" in printed(capsys, *arguments)


BACKEND = """
from arb_ternary import hookimpl
from arb_ternary.backends.protocol import REQUIRED_OPS, ProbeResult
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)

@hookimpl
def arb_register_backends():
    return [BackendSpec(name="NAME", target="fake_NAME:build", probe="fake_NAME:probe",
        priority=-5)]

def probe(device):
    return ProbeResult(True, "a fake")

class Backend:
    name = "NAME"
    capabilities = frozenset()
    kernels = dict.fromkeys(REQUIRED_OPS, print)

    def measured(self, op, rows, shape, integer):
        return ANSWER

def build():
    return Backend()
"""


def test_measured_times_are_listed_fastest_first(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, seconds in (("slow", 4e-5), ("fast", 1.25e-5), ("idle", None)):
        answer = None if seconds is None else {"seconds": seconds, "shape": [16, 4096, 4096]}
        source = BACKEND.replace("NAME", name).replace("ANSWER", repr(answer))
        install_fake_plugin(
            tmp_path,
            f"arb-{name}",
            {f"fake_{name}.py": source},
            entry_points={name: f"fake_{name}"},
        )
    reset_manager()
    arguments = ("linear", "9,4000,4096", "--backend", "torch")
    measured = json.loads(printed(capsys, *arguments, "--json"))["measured"]
    assert [name for name in measured if name in ("slow", "fast", "idle")] == ["fast", "slow"]
    assert measured["fast"] == {"seconds": 1.25e-5, "shape": [16, 4096, 4096]}
    assert "  measured  fast: 12.5 us at M x N x K = 16 x 4096 x 4096" in printed(
        capsys, *arguments
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linea", "1,2,3"), "OP: 'linea' is not an op of a backend"),
        (("linear", "1,2"), "'1,2' is not M,N,K"),
        (("linear", "0,2,3"), "'0,2,3' is not M,N,K"),
    ],
)
def test_an_op_that_cannot_be_explained_is_an_error(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backends", "roofline", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}\n")
