"""Kernels: every op runs, and wrong results, unwritten outputs and wrong sums are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from _kernels import ops
from _kernels.cells import Cell, check, poisoned
from _kernels.gpu import check_device
from _kernels.limits import int8_limit, read_limit
from _kernels.operands import Operands
from _kernels.peers import peers
from arb_ternary.backends.dispatch import kernel
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem
from kernels import main


def cell(op: str, *, cold: bool = False) -> Cell:
    return Cell(op=op, rows=3, out_features=8, in_features=256, cold=cold, cache_bytes=1 << 12)


def test_the_script_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cache_size", lambda device: 1 << 12)
    command = ["--backends", "torch", "--shapes", "8x256", "--m", "2", "--seconds", "1e-4"]
    command += ["--ops", "linear,apply_scaled_votes"]
    done = CliRunner().invoke(main, [*command, "--threads", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    for one in cells:
        assert one["rows"][0]["contender"] == "torch"
        for row in one["rows"]:
            assert 0 < row["seconds_min"] <= row["seconds_median"]
    linear = next(one for one in cells if one["op"] == "linear")
    names = {row["contender"] for row in linear["rows"]}
    assert {"torch + quantize_rows", "torch bfloat16"} <= names
    assert {"ggml TQ2_0", "ggml TQ1_0"} <= names or "not installed" in linear["excluded"][0]


def test_cold_calls_rotate_among_copies_beyond_the_cache() -> None:
    cold = cell("linear", cold=True)
    assert len(cold.repeated(dict, 100)) * 100 >= 2 * cold.cache_bytes
    assert len(cold.repeated(dict, 4 * cold.cache_bytes)) == 1
    assert len(cell("linear").repeated(dict, 100)) == 1


@pytest.mark.parametrize("op", ops.OPS)
def test_a_wrong_kernel_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = op.removesuffix("_int8")

    def planted(backend: str, asked: str) -> Callable[..., Any]:
        real = kernel("torch", asked)
        if backend != "planted" or asked != name:
            return real

        def wrong(*arguments: Any) -> Any:
            result = real(*arguments)
            if op in ("cast_scaled_votes_int8", "apply_scaled_votes"):
                arguments[3 if op.startswith("cast") else 0].votes.flatten()[-1] += 1
            else:
                result[-1, -1] += 1
            return result

        return wrong

    monkeypatch.setattr(ops, "kernel", planted)
    found = ops.OPS[op](Operands(cell(op), 0), ["planted"])
    with pytest.raises(ArbError, match="elements are wrong"):
        found[0].check()
    for right in ops.OPS[op](Operands(cell(op), 0), ["torch"]):
        right.check()


def test_a_change_of_state_is_restored() -> None:
    operands = Operands(cell("apply_scaled_votes"), 0)
    backend = ops.apply_votes(operands, ["torch"])[0]
    for _ in range(2):  # a second call would find no accumulator beyond its threshold
        backend.call(0)
        assert backend.restore is not None
        backend.restore(0)
        backend.check()


def test_results_that_differ_or_were_not_written_are_refused() -> None:
    right = torch.arange(4.0)
    with pytest.raises(ArbError, match="1 of 4 elements are wrong"):
        check("x", torch.tensor([0.0, 1.0, 2.0, 4.0]), right)
    with pytest.raises(ArbError, match="int64"):
        check("x", right.to(torch.int64), right)
    with pytest.raises(ArbError, match="elements are wrong"):
        check("x", right + 0.2, right, 0.05)
    with poisoned():
        unwritten = torch.empty(4)
    with pytest.raises(ArbError, match="4 of 4 elements are wrong"):
        check("x", unwritten, right, 0.05)


def test_ggml_multiplies_right_and_a_wrong_product_is_refused() -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    operands = Operands(cell("linear"), 0)
    found, excluded = peers(operands)
    assert [each.name for each in found] == ["ggml TQ2_0", "ggml TQ1_0"]
    assert not excluded
    for peer in found:
        peer.check()
    trits = operands.trits.clone()
    operands.x = operands.x.flip(0)
    wrong, _ = peers(operands)
    assert torch.equal(operands.trits, trits)
    wrong[0].check()
    operands.x.neg_()  # after the right result was taken
    with pytest.raises(ArbError, match="elements are wrong"):
        wrong[0].check()


def test_a_probe_that_does_not_read_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        probe_read = staticmethod(lambda buffer: int(buffer.view(torch.int64)[1:].sum()))

    monkeypatch.setattr("_kernels.limits.get_backend", lambda name: Backend)
    with pytest.raises(ComponentError, match="words sum to"):
        read_limit(["lazy"], 1 << 12)
    assert "torch._int_mm" in int8_limit(["lazy"]).how


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_of_the_machine() -> None:
    with pytest.raises(EnvironmentProblem, match="--device cuda"):
        check_device("cuda")
