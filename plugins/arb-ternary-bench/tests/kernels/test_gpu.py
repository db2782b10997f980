"""The bench on a GPU, as far as it can be tried without one: what is refused, how calls are timed,
what it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner

from arb_ternary.backends import reference_probe
from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary_bench.cli.bench import bench
from arb_ternary_bench.kernels import bench as bench_module
from arb_ternary_bench.kernels import gpu, peer_gemlite, probes
from arb_ternary_bench.kernels.bench import KernelBench, run_kernel_bench
from arb_ternary_bench.kernels.cache import Cache
from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.gpu import EventClock, as_graph, check_device, on_device, small
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_gemlite import GemlitePeer
from arb_ternary_bench.kernels.peers import choose_peers, list_peers, peer_contender
from arb_ternary_bench.kernels.result import TABLE
from arb_ternary_bench.kernels.timing import Variant, measure

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]

# --- refused


def test_command_without_a_gpu_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        gpu,
        "probe",
        lambda _: ProbeResult(False, "torch 2.13.0+cpu is built without CUDA and ROCm"),
    )
    error = CliRunner().invoke(bench, ["kernels", "--device", "cuda"]).exception
    assert isinstance(error, EnvironmentProblem)
    assert error.exit_code == 3
    assert error.what == "--device cuda: torch 2.13.0+cpu is built without CUDA and ROCm"
    assert error.hint == (
        "run it on a machine with a GPU and a build of torch for it; `arb doctor` shows what is "
        "here, and `arb backends list --device cuda` what every backend needs"
    )


def test_a_gpu_that_torch_cannot_use_or_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda _: ProbeResult(True, "torch"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="--device cuda: torch cannot use the GPU"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("cuda:0")
    with pytest.raises(EnvironmentProblem, match="--device cuda:1: there is only 1"):
        check_device("cuda:1")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", ""])
def test_what_is_no_device_of_the_bench_is_refused(device: str) -> None:
    error = CliRunner().invoke(bench, ["kernels", "--device", device]).exception
    assert isinstance(error, UsageProblem)
    assert error.hint == "cpu, cuda or cuda:N"


def test_the_device_is_checked_before_backends_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "probe", reference_probe.probe)
    monkeypatch.setattr(reference_probe, "version", lambda _name: "2.13.0")
    monkeypatch.setattr(reference_probe, "_DEVICE_NODES", ())
    monkeypatch.setattr(reference_probe.shutil, "which", lambda _name: None)
    error = (
        CliRunner()
        .invoke(bench, ["kernels", "--backends", "nonsense", "--device", "cuda"])
        .exception
    )
    assert isinstance(error, EnvironmentProblem)
    assert error.what == "--device cuda: no CUDA or ROCm driver was found"


# --- timed


class FakeGpu:
    """A queue that takes note of what is put into it, and events that are a given time apart."""

    def __init__(self, milliseconds: float = 0.25) -> None:
        self.queue: list[str] = []
        self.milliseconds = milliseconds

    def event(self) -> Any:
        def note(what: str) -> Callable[[], None]:
            return lambda: self.queue.append(what)

        return SimpleNamespace(
            record=note("event"),
            synchronize=note("wait"),
            elapsed_time=lambda _end: self.milliseconds,
        )

    def clock(self, *, cold: bool) -> EventClock:
        flush = (lambda: self.queue.append("flush")) if cold else None
        return EventClock(self.event, lambda: self.queue.append("head start"), flush)


@pytest.mark.parametrize("cold", [False, True])
def test_a_call_is_timed_between_events_behind_a_head_start(cold: bool) -> None:
    fake = FakeGpu()
    seconds = fake.clock(cold=cold)(
        Variant(name="a", call=lambda i: fake.queue.append(f"call {i}")), 7
    )
    assert seconds == 0.25e-3
    assert fake.queue == ["flush"] * cold + ["head start", "event", "call 7", "event", "wait"]


def test_measuring_goes_by_the_clock_that_is_given() -> None:
    timing = measure(
        [Variant(name="a", call=lambda _: None)], 1e-3, FakeGpu(2.0).clock(cold=False)
    )["a"]
    assert (timing.least, timing.median) == (2e-3, 2e-3)


def test_overhead_of_a_clock_is_a_part_of_its_time() -> None:
    calls = {
        spacing: measure(
            [Variant(name="a", call=lambda _: None)],
            0.8,
            FakeGpu(1.0).clock(cold=False),
            spacing=spacing,
        )
        for spacing in (0.0, 9e-3)
    }
    assert (calls[0.0]["a"].calls, calls[9e-3]["a"].calls) == (8 * 100, 8 * 10)


def contender(call: Callable[[int], Any], copies: int = 1, note: str = "") -> Contender:
    variant = Variant(name="a", call=call, copies=copies)
    return Contender(
        variant=variant, role="backend", name="a", check=lambda: None, checked="exact", note=note
    )


def test_every_copy_of_a_small_call_becomes_a_graph_of_its_own() -> None:
    made: list[int] = []
    recorded: list[Callable[[], object]] = []

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        call()
        recorded.append(call)
        place = len(recorded) - 1
        return lambda: made.append(100 + place)

    graph = as_graph(contender(made.append, copies=2, note="sums"), capture)
    assert made == [0, 1]
    graph.variant.call(0)
    graph.variant.call(1)
    assert made == [0, 1, 100, 101]
    assert graph.note == "sums; as a graph"


def test_call_without_graph_capture_is_timed_eagerly_and_noted() -> None:
    def capture(_call: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain = contender(print)
    left = as_graph(plain, capture)
    assert left.variant == plain.variant
    assert left.note == "not as a graph: operation not permitted when stream is capturing"


def test_a_cpu_needs_no_current_gpu() -> None:
    with on_device("cpu") as nothing:
        assert nothing is None


def test_layers_up_to_2048_square_are_small(make_cell: Callable[..., Cell]) -> None:
    assert small(make_cell(out_features=2048, in_features=2048))
    assert not small(make_cell(out_features=2049, in_features=2048))


def test_a_cold_call_on_a_gpu_needs_no_copies(make_cell: Callable[..., Cell]) -> None:
    assert make_cell(cold=True).copies(1 << 10) > 1
    assert make_cell(cold=True, device="cuda").copies(1 << 10) == 1


# --- the whole bench


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The bench believes that ``meta-gpu`` is one: its tensors lie on the CPU, its clock is a
    fake.
    """
    fake = FakeGpu(0.5)
    monkeypatch.setattr(bench_module, "check_device", lambda _: None)
    monkeypatch.setattr(bench_module, "_cache_of", lambda _: Cache(1 << 16, "a test"))
    monkeypatch.setattr(bench_module, "_clock", lambda cell: (fake.clock(cold=cell.cold), 0.0))
    facts = {"name": "Pretended", "multiprocessors": 3, "cuda": "13.0", "hip": None}
    monkeypatch.setattr(bench_module, "gpu_facts", lambda _: facts)
    monkeypatch.setattr(bench_module, "as_graph", lambda each: as_graph(each, lambda call: call))
    monkeypatch.setattr(gpu, "_LEAST_BUFFER", 1 << 16)
    monkeypatch.setattr(gpu, "_EDGE", 64)
    return fake


def on_pretended_gpu(**changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "backends": ("torch",),
        "shapes": ((32, 64),),
        "rows": (2,),
        "groups": (32,),
        "caches": ("hot", "cold"),
        "ops": ("linear", "cast_scaled_votes", "apply_scaled_votes", "quantize_rows"),
        "seconds": 1e-3,
        "device": "cpu:0",
    }
    return run_kernel_bench(KernelBench(**{**sizes, **changes}))


def test_gpu_result_has_the_keys_of_the_cpu_result(
    pretend: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = on_pretended_gpu()
    assert result["device"] == "cpu:0"
    assert result["machine"]["gpu"]["name"] == "Pretended"
    assert result["probes"]["bfloat16_peak"] == "torch.matmul of 64 x 64 matrices in bfloat16"
    for cell in result["cells"]:
        # a copy reads and writes
        assert cell["read_bandwidth"] == pytest.approx((2 << 19) / 0.5e-3)
        assert cell["int8_peak"] == cell["bfloat16_peak"] == pytest.approx(2 * 64**3 / 0.5e-3)
        for row in cell["rows"]:
            assert row["seconds_min"] == 0.5e-3
            assert row["copies"] == 1
            assert row["note"].endswith("as a graph")
            assert row["of_bfloat16_peak"] == pytest.approx(row["of_int8_peak"])
    assert "flush" in pretend.queue
    monkeypatch.undo()
    monkeypatch.setattr(probes, "_LEAST_BUFFER", 1 << 16)
    monkeypatch.setattr(probes, "_PEAK_EDGE", 64)
    plain = on_pretended_gpu(device="cpu", cache_bytes=1 << 16)
    assert plain.keys() == result.keys()
    assert plain["machine"].keys() == result["machine"].keys()
    assert plain["machine"]["gpu"] is None
    for one, other in zip(plain["cells"], result["cells"], strict=True):
        assert one.keys() == other.keys()
        assert one["bfloat16_peak"] is None
        assert one["rows"][0].keys() == other["rows"][0].keys()
        assert one["rows"][0]["of_bfloat16_peak"] is None


@pytest.mark.usefixtures("pretend")
def test_the_table_names_the_gpu_and_its_limits() -> None:
    result = on_pretended_gpu(ops=("linear",))
    lines = TABLE.rows(result)
    assert {len(line) for line in lines} == {len(TABLE.columns)}
    assert "limit: bf16" in [line[5] for line in lines]
    assert (
        TABLE.notes(result)[0]
        == "Pretended, 3 multiprocessors, CUDA 13.0; times are those between two events."
    )
    assert "before every call twice the second-level cache is written" in TABLE.markdown(result)


@pytest.mark.usefixtures("pretend")
def test_baseline_that_refuses_a_shape_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("self.size(0) needs to be greater than 16, but got 2")

    peak = gpu.matrix_probe("cpu", torch.bfloat16)
    int8 = evolve(peak, variant=evolve(peak.variant, name="int8 peak"))
    monkeypatch.setattr(
        bench_module, "matrix_probe", lambda _, dtype: int8 if dtype is torch.int8 else peak
    )
    monkeypatch.setattr(
        "arb_ternary.backends.reference.int_matmul", lambda a, b, _: a.int() @ b.int()
    )
    monkeypatch.setattr(torch, "_int_mm", refuse)
    (cell,) = on_pretended_gpu(ops=("linear",), caches=("hot",))["cells"]
    assert {
        "name": "torch._int_mm",
        "reason": "RuntimeError: self.size(0) needs to be greater than 16, but got 2",
    } in (cell["excluded"])


@pytest.mark.parametrize("op", ["linear", "linear_grad_input", "apply_scaled_votes"])
@pytest.mark.parametrize("cache", ["hot", "cold"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_a_gpu_runs_the_bench_from_end_to_end(device: str, cache: str, op: str) -> None:
    bench = KernelBench(
        backends=("torch",),
        shapes=((256, 512),),
        rows=(32,),
        groups=(128,),
        ops=(op,),
        caches=(cache,),
        seconds=0.01,
        device=device,
    )
    (cell,) = run_kernel_bench(bench)["cells"]
    assert all(row["seconds_min"] > 0 for row in cell["rows"])


# --- peers


def test_peers_on_a_gpu_that_are_not_there_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_gemlite, "find_spec", lambda _name: None)
    listed = [(peer["name"], peer["reason"], peer["install"]) for peer in list_peers("cuda")]
    assert listed == [("gemlite", "gemlite is not installed", "pip install gemlite")]
    assert choose_peers("auto", "cuda") == ()
    message = "--peers: 'gemlite' cannot be used: gemlite is not installed"
    with pytest.raises(UsageProblem, match=message):
        choose_peers("gemlite", "cuda")
    with pytest.raises(UsageProblem, match="there is no peer 'gemlite'"):
        choose_peers("gemlite", "cpu")


class _Gemlite:
    """The part of gemlite that is used: a layer of the mode, from a float weight of trits and one
    scale.
    """

    factor = 1.0

    def __init__(self, device: str) -> None:
        self.device = device

    def from_weights(
        self, weight: torch.Tensor, weight_scale: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        scale = weight_scale.item() * self.factor
        return lambda x: ((x.float() @ weight.float().t()) * scale).to(x.dtype)


@pytest.mark.parametrize("mode", ["A8W158_INT_dynamic", "A8W158"])
def test_gemlite_is_called_as_its_releases_want_it(
    mode: str, make_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = ModuleType("gemlite.helper")
    setattr(helper, mode, _Gemlite)
    monkeypatch.setitem(sys.modules, "gemlite", ModuleType("gemlite"))
    monkeypatch.setitem(sys.modules, "gemlite.helper", helper)
    cell = make_cell(in_features=256, out_features=64)
    made = peer_contender(GemlitePeer(), cell, Operands(cell, 3))
    made.check()
    assert made.variant.rotated_bytes == 64 * 256 // 4
    monkeypatch.setattr(_Gemlite, "factor", 1.5)
    with pytest.raises(ArbError, match="gemlite: the largest error"):
        peer_contender(GemlitePeer(), cell, Operands(cell, 3)).check()
    delattr(helper, mode)
    with pytest.raises(ArbError, match="has none of A8W158_INT_dynamic, A8W158"):
        GemlitePeer().prepare(cell, Operands(cell, 3))


def test_shapes_that_gemlite_does_not_take_are_left_out(make_cell: Callable[..., Cell]) -> None:
    peer = GemlitePeer()
    assert "must be 0" in peer.serves(make_cell(in_features=160))
    assert peer.serves(make_cell(in_features=256, out_features=64)) is None


@pytest.mark.usefixtures("pretend")
def test_a_peer_that_breaks_is_left_out_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: Any) -> None:
        raise KeyError("sm_999")

    monkeypatch.setattr(GemlitePeer, "prepare", break_down)
    (cell,) = on_pretended_gpu(
        ops=("linear",), caches=("hot",), shapes=((32, 128),), peers=(GemlitePeer(),)
    )["cells"]
    assert {"name": "gemlite", "reason": "KeyError: 'sm_999'"} in cell["excluded"]
