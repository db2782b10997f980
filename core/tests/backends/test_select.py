"""The selection of a backend, and the messages about the others."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from importlib import metadata

import pytest

from arb_ternary.backends import reference_probe
from arb_ternary.backends import select as selecting
from arb_ternary.backends.protocol import REQUIRED_OPS
from arb_ternary.backends.select import (
    BackendRequest,
    Selection,
    candidates,
    current_backend,
    get_backend,
    request_backend,
    select,
    use_backend,
)
from arb_ternary.errors import ComponentError, EnvironmentProblem, UsageProblem, render
from arb_ternary.plugins.manager import manager

BACKEND = """
from arb_ternary import hookimpl
from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)

@hookimpl
def arb_register_backends():
    where = dict(target="fake_NAME:build", probe="fake_NAME:probe")
    return [BackendSpec(name="NAME", **where, priority=PRIORITY, devices=DEVICES)]

def probe(device):
    RESULT

class Backend:
    name = "NAME"
    capabilities = frozenset({"fused_votes"})
    kernels = {op: print for op in OPS}

def build():
    return Backend()
"""


def backend(
    name: str,
    result: str = "return ProbeResult(True, 'a fake')",
    *,
    priority: int = 20,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    ops: tuple[str, ...] = REQUIRED_OPS,
) -> str:
    text = (
        BACKEND.replace("NAME", name).replace("RESULT", result).replace("PRIORITY", str(priority))
    )
    return text.replace("DEVICES", repr(devices)).replace("OPS", repr(ops))


UNUSABLE = "return ProbeResult(False, 'the kernel library is too old')"
TORCH = f"torch {metadata.version('torch')}"


@pytest.fixture(autouse=True)
def _only_the_core_and_fakes(install_plugin):
    """Start every test of this file with the core alone."""


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="arb_ternary.backends")
    return caplog


def chosen(value: str, device: str = "cpu") -> Selection:
    return select(BackendRequest(value, "ARB_TERNARY_BACKEND", device))


# --- where a request comes from


@pytest.mark.parametrize(
    ("command_line", "variable", "config", "expected"),
    [
        ("a", "b", "c", ("a", "command line")),
        (None, "b", "c", ("b", "ARB_TERNARY_BACKEND")),
        ("", "b", "c", ("b", "ARB_TERNARY_BACKEND")),
        (None, None, "c", ("c", "config")),
        (None, " ", "c", ("c", "config")),
        (None, "auto", "c", ("auto", "ARB_TERNARY_BACKEND")),
        (None, None, None, ("auto", "default")),
    ],
)
def test_command_line_overrules_variable_overrules_config(
    monkeypatch, command_line, variable, config, expected
):
    if variable is not None:
        monkeypatch.setenv("ARB_TERNARY_BACKEND", variable)

    request = request_backend(command_line=command_line, config=config, device="cuda:1")

    assert (request.value, request.source) == expected
    assert request.device == "cuda:1"


# --- auto


@pytest.mark.parametrize("value", ["auto", "", "  ", " AUTO "])
def test_auto_takes_the_highest_usable_priority(install_plugin, log, value):
    install_plugin("slow", backend("slow", priority=5))
    install_plugin("fast", backend("fast", priority=30))
    install_plugin("old", backend("old", UNUSABLE, priority=99))

    selection = chosen(value)

    assert selection == Selection(
        "fast",
        "ARB_TERNARY_BACKEND",
        (("old", "the kernel library is too old"), ("slow", "priority 5"), ("torch", "priority 0")),
        "highest priority (30), a fake",
    )
    assert log.messages == ["backend fast on cpu, auto; why: arb backends explain"]


def test_auto_takes_a_last_resort_only_after_every_other_backend(install_plugin):
    install_plugin(
        "odd",
        backend("odd", "return ProbeResult(True, 'an interpreter', last_resort=True)", priority=99),
    )

    assert chosen("auto").name == "torch"
    assert dict(chosen("auto").rejected) == {"odd": "an interpreter"}
    assert [candidate.name for candidate in candidates("cpu")] == ["torch", "odd"]
    assert chosen("odd").name == "odd"


def test_auto_skips_a_backend_that_does_not_serve_the_device(install_plugin):
    install_plugin("gpu", backend("gpu", devices=("cuda",)))

    assert chosen("auto").name == "torch"
    assert dict(chosen("auto").rejected) == {"gpu": "it serves cuda"}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (
            "raise OSError('libcuda.so not found')",
            "its probe failed: OSError: libcuda.so not found",
        ),
        ("return True", "its probe returned True instead of a ProbeResult"),
    ],
)
def test_a_probe_that_fails_makes_the_backend_unusable(install_plugin, result, reason):
    install_plugin("bad", backend("bad", result))

    assert dict(chosen("auto").rejected) == {"bad": reason}


def test_equal_priorities_are_ordered_by_name(install_plugin):
    install_plugin("b", backend("b"))
    install_plugin("a", backend("a"))

    assert [candidate.name for candidate in candidates()] == ["a", "b", "torch"]


def test_auto_fails_on_a_device_without_backend():
    with pytest.raises(EnvironmentProblem) as caught:
        chosen("auto", "xla")

    assert (
        render(caught.value)
        == "error: no backend can be used on xla\n  torch: it serves cpu, cuda, mps"
    )


class Opinion:
    def __init__(self, choice):
        self.choice = choice
        self.asked = []

    def __call__(self, request, candidates):
        self.asked.append((request.value, tuple(candidates)))
        return self.choice and ("judge", self.choice)


def test_an_observer_of_the_run_can_choose_for_auto(install_plugin):
    install_plugin("fast", backend("fast"))
    install_plugin("old", backend("old", UNUSABLE))
    opinion = Opinion("torch")

    selection = select(BackendRequest(), opinion)

    assert opinion.asked == [("auto", ("fast", "torch"))]
    assert selection.name == "torch"
    assert selection.reason == f"chosen by observer 'judge', {TORCH}"
    assert selection.rejected == (
        ("fast", "priority 20"),
        ("old", "the kernel library is too old"),
    )


def test_no_opinion_leaves_the_first_candidate(install_plugin):
    install_plugin("fast", backend("fast"))

    assert select(BackendRequest(), Opinion(None)).name == "fast"


def test_a_named_backend_is_never_put_to_a_vote(install_plugin):
    install_plugin("fast", backend("fast"))
    opinion = Opinion("fast")

    assert select(BackendRequest("torch"), opinion).name == "torch"
    assert select(BackendRequest("torch,fast"), opinion).name == "torch"
    assert opinion.asked == []


# --- names


@pytest.mark.parametrize("value", ["torch", " Torch ", "TORCH"])
def test_a_name_is_trimmed_and_its_case_does_not_matter(install_plugin, value):
    install_plugin("fast", backend("fast"))

    assert chosen(value) == Selection("torch", "ARB_TERNARY_BACKEND", (), TORCH)


def test_a_named_backend_never_falls_back(install_plugin):
    install_plugin("old", backend("old", UNUSABLE))

    with pytest.raises(EnvironmentProblem) as caught:
        chosen("old")

    assert render(caught.value) == (
        "error: ARB_TERNARY_BACKEND: backend 'old' cannot be used on cpu: the kernel library is "
        "too old\n"
        "  usable on cpu: torch"
    )
    assert caught.value.exit_code == 3


def test_a_list_is_an_order_and_logs_each_rejection(install_plugin, log):
    install_plugin("old", backend("old", UNUSABLE))

    selection = chosen("triton, OLD ,torch, torch")

    assert selection == Selection(
        "torch",
        "ARB_TERNARY_BACKEND",
        (
            ("triton", "it is not installed (pip install arb-ternary-triton)"),
            ("old", "the kernel library is too old"),
        ),
        TORCH,
    )
    assert log.messages == [
        "backend triton rejected on cpu, from ARB_TERNARY_BACKEND: "
        "it is not installed (pip install arb-ternary-triton)",
        "backend old rejected on cpu, from ARB_TERNARY_BACKEND: the kernel library is too old",
        f"backend torch on cpu, from ARB_TERNARY_BACKEND: {TORCH}",
    ]


def test_a_list_without_usable_backend_gives_every_reason(install_plugin):
    install_plugin("old", backend("old", UNUSABLE))

    with pytest.raises(EnvironmentProblem) as caught:
        chosen("triton,old")

    assert render(caught.value) == (
        "error: ARB_TERNARY_BACKEND: "
        "backend 'triton' cannot be used on cpu: it is not installed (pip install "
        "arb-ternary-triton); "
        "backend 'old' cannot be used on cpu: the kernel library is too old\n"
        "  usable on cpu: torch"
    )


def test_an_unknown_name_gets_the_nearest_and_all_names(install_plugin):
    install_plugin("old", backend("old", UNUSABLE))

    with pytest.raises(UsageProblem) as caught:
        chosen("tritn")

    assert render(caught.value) == (
        "error: ARB_TERNARY_BACKEND: no backend is called 'tritn'\n"
        "  did you mean 'triton'?\n"
        "  available: torch\n"
        "  unavailable: old (the kernel library is too old)\n"
        "  not installed: cpu (pip install arb-ternary-cpu)\n"
        "  not installed: triton (pip install arb-ternary-triton)"
    )
    assert caught.value.exit_code == 2


def test_an_unknown_name_in_a_list_is_an_error():
    with pytest.raises(UsageProblem, match="no backend is called 'tritn'"):
        chosen("torch,tritn")


def test_a_backend_that_is_not_installed_names_the_command():
    with pytest.raises(EnvironmentProblem) as caught:
        chosen("triton")

    assert render(caught.value) == (
        "error: ARB_TERNARY_BACKEND: backend 'triton' is not installed\n  pip install "
        "arb-ternary-triton"
    )
    assert caught.value.exit_code == 3


def test_a_backend_whose_plugin_failed_says_so(install_plugin):
    install_plugin("triton", "raise RuntimeError('half written')")

    with pytest.raises(EnvironmentProblem) as caught:
        chosen("triton")

    assert render(caught.value) == (
        "error: ARB_TERNARY_BACKEND: backend 'triton' may come from plugin 'triton' "
        "(arb-ternary-triton 1.0), "
        "which failed to load: RuntimeError: half written\n"
        "  see: arb plugins show triton"
    )


@pytest.mark.parametrize("value", [",torch", "torch,", "torch,,torch"])
def test_an_empty_name_in_a_list_is_an_error(value):
    with pytest.raises(UsageProblem, match="has an empty name between its commas"):
        chosen(value)


def test_auto_does_not_mix_with_names():
    with pytest.raises(UsageProblem, match="'torch,auto' mixes 'auto' with names"):
        chosen("torch,auto")


# --- the backend in use


def test_the_current_backend_follows_the_variable(install_plugin, monkeypatch):
    install_plugin("fast", backend("fast"))

    assert current_backend() == "fast"
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    assert current_backend() == "torch"
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "fast")
    assert current_backend() == "fast"


def test_what_the_variable_says_is_resolved_once(install_plugin, log):
    install_plugin("fast", backend("fast"))

    assert [current_backend() for _ in range(3)] == ["fast"] * 3
    assert len(log.messages) == 1


def test_the_current_backend_can_be_asked_for_another_device(install_plugin):
    install_plugin("gpu", backend("gpu", devices=("cuda",)))

    assert (current_backend(), current_backend("cuda")) == ("torch", "gpu")


def test_use_backend_nests_and_ends_with_its_block(install_plugin, monkeypatch):
    install_plugin("fast", backend("fast"))
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "fast")

    with use_backend("torch") as outer:
        assert (outer, current_backend()) == ("torch", "torch")
        with use_backend(" FAST "):
            assert current_backend() == "fast"
        assert current_backend() == "torch"
    assert current_backend() == "fast"


def test_use_backend_ends_when_its_block_fails(install_plugin):
    install_plugin("fast", backend("fast"))

    with pytest.raises(ZeroDivisionError), use_backend("torch"):
        1 / 0  # noqa: B018

    assert current_backend() == "fast"


def test_use_backend_is_local_to_its_thread(install_plugin):
    install_plugin("fast", backend("fast"))
    seen = []

    with use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(current_backend()))
        thread.start()
        thread.join()

    assert seen == ["fast"]


def test_use_backend_accepts_a_backend_that_works_on_some_device(install_plugin):
    install_plugin("gpu", backend("gpu", devices=("cuda",)))

    with use_backend("gpu"):
        assert current_backend() == "gpu"


@pytest.mark.parametrize("name", ["auto", "torch,fast", ""])
def test_use_backend_takes_exactly_one_name(name):
    with pytest.raises(UsageProblem, match="is not the name of one backend"), use_backend(name):
        pass


def test_use_backend_refuses_an_unusable_backend(install_plugin):
    install_plugin("old", backend("old", UNUSABLE))

    with (
        pytest.raises(EnvironmentProblem, match="backend 'old' cannot be used on cpu"),
        use_backend("old"),
    ):
        pass
    with (
        pytest.raises(UsageProblem, match="use_backend: no backend is called 'tritn'"),
        use_backend("tritn"),
    ):
        pass
    assert current_backend() == "torch"


def test_a_backend_is_built_once_and_again_for_other_plugins(install_plugin):
    install_plugin("fast", backend("fast"))
    first = get_backend("fast")

    assert get_backend("fast") is first
    install_plugin("other", backend("other"))
    assert get_backend("fast") is not first


def test_the_reference_keeps_the_protocol():
    built = get_backend("torch")

    assert built.name == "torch"
    assert set(REQUIRED_OPS) <= set(built.kernels)


@pytest.mark.parametrize(
    ("source", "problem", "message"),
    [
        (
            backend("bad", ops=REQUIRED_OPS[2:]),
            ComponentError,
            r"lacks required ops: pack, unpack$",
        ),
        (
            backend("bad", ops=(*REQUIRED_OPS, "embeding")),
            ComponentError,
            r"has an unknown op 'embeding'\n.*'embedding'",
        ),
        (backend("bad").replace('    name = "bad"\n', ""), ComponentError, r"lacks: name$"),
        (
            backend("bad").replace('    name = "bad"\n', '    name = "good"\n'),
            ComponentError,
            "calls itself 'good'",
        ),
        (
            backend("bad").replace("fake_bad:build", "fake_bad:built"),
            EnvironmentProblem,
            "cannot be built: AttributeError",
        ),
        (
            backend("bad").replace("return Backend()", "return 1 / 0"),
            EnvironmentProblem,
            "ZeroDivisionError: division",
        ),
    ],
)
def test_a_backend_that_breaks_the_protocol_is_refused(install_plugin, source, problem, message):
    install_plugin("bad", source)

    with pytest.raises(
        problem, match=r"^backend 'bad' of plugin 'bad' \(arb-ternary-bad 1.0\) .*" + message
    ):
        get_backend("bad")


# --- the probe of the reference


def test_the_probe_of_the_reference_imports_no_torch():
    check = (
        "import sys\n"
        "from arb_ternary.backends.reference_probe import probe\n"
        "print(probe('cpu').usable, probe('cuda').usable in (True, False), 'torch' in "
        "sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert done.stdout == "True True False\n"


@pytest.mark.parametrize(
    ("release", "visible", "nodes", "expected"),
    [
        ("2.13.0+cpu", None, True, (False, "torch 2.13.0+cpu is built without CUDA and ROCm")),
        ("2.13.0", "", True, (False, "CUDA_VISIBLE_DEVICES hides every device")),
        ("2.13.0", "-1", True, (False, "CUDA_VISIBLE_DEVICES hides every device")),
        ("2.13.0", None, False, (False, "no CUDA or ROCm driver was found")),
        ("2.13.0+cu130", "0,1", True, (True, "torch 2.13.0+cu130")),
    ],
)
def test_the_probe_of_the_reference_says_why_cuda_cannot_be_used(
    monkeypatch, tmp_path, release, visible, nodes, expected
):
    node = tmp_path / "driver"
    if nodes:
        node.touch()
    monkeypatch.setattr(reference_probe, "version", lambda _name: release)
    monkeypatch.setattr(reference_probe, "_DEVICE_NODES", (str(node),))
    monkeypatch.setattr(reference_probe.shutil, "which", lambda _name: None)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    result = reference_probe.probe("cuda:0")

    assert (result.usable, result.reason) == expected


def test_the_probe_without_torch_or_on_an_unknown_device(monkeypatch):
    assert not reference_probe.probe("xla").usable
    monkeypatch.setattr(reference_probe, "find_spec", lambda _name: None)
    assert reference_probe.probe("cpu").reason == "torch is not installed"


def test_what_was_chosen_is_forgotten_on_reset(install_plugin, log):
    current_backend()
    selecting.reset_backends()
    current_backend()

    assert len(log.messages) == 2
    assert manager().registry.names("backend") == ("torch",)
