"""The registry of peers: what is not there says why, what is there is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attrs import frozen

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_bench.kernels import peer_ggml, peers
from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_ggml import GgmlPeer
from arb_ternary_bench.kernels.peer_product import PeerProduct, aligned
from arb_ternary_bench.kernels.peers import choose_peers, list_peers, peer_contender


@frozen
class NumpyPeer:
    """A peer that is always there; ``factor`` other than 1 makes it wrong."""

    factor: float = 1.0
    name: str = "numpy"
    summary: str = "float32 through numpy"
    install: str = "pip install numpy"
    absent: str | None = None

    def available(self) -> str | None:
        return self.absent

    def serves(self, cell: Cell) -> str | None:
        return None if cell.in_features % 32 == 0 else "K must be a multiple of 32"

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        weight = operands.trits.numpy().astype(np.float32).T * np.float32(self.factor)
        x = operands.x.numpy()
        output = np.zeros((cell.rows, cell.out_features), np.float32)
        return PeerProduct(
            lambda _: np.matmul(x, weight, out=output), 1, weight.nbytes, output, None
        )


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ggml, "find_spec", lambda name: None)


@pytest.mark.usefixtures("nothing_installed")
def test_absent_peers_are_listed_with_reason_and_command() -> None:
    listed = list_peers()
    assert [each["name"] for each in listed] == ["ggml TQ2_0", "ggml TQ1_0"]
    for each in listed:
        assert not each["available"]
        assert each["reason"]
        assert "install" in each["install"]
    assert choose_peers("auto") == ()


@pytest.mark.usefixtures("nothing_installed")
def test_named_but_absent_peer_is_an_error_with_the_command() -> None:
    with pytest.raises(UsageProblem, match="llama_cpp is not installed") as caught:
        choose_peers("ggml tq2_0")
    assert caught.value.hint == "pip install llama-cpp-python"


def test_error_of_a_mistyped_peer_names_the_nearest() -> None:
    with pytest.raises(UsageProblem, match="no peer 'ggml tq3_0'") as caught:
        choose_peers("ggml TQ3_0")
    assert "did you mean 'ggml tq2_0'?" in caught.value.hint


def test_none_takes_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", (NumpyPeer(),))
    assert choose_peers("none") == ()
    assert [peer.name for peer in choose_peers("auto")] == ["numpy"]
    assert [peer.name for peer in choose_peers("Numpy, numpy")] == ["numpy"]


def test_a_peers_product_is_checked_with_a_poisoned_output(make_cell: Callable[..., Cell]) -> None:
    cell = make_cell()
    operands = Operands(cell, 5)
    peer_contender(NumpyPeer(), cell, operands).check()
    for factor in (1.5, float("nan")):
        with pytest.raises(ArbError, match="linear 48x160, M = 3, hot: numpy: the largest error"):
            peer_contender(NumpyPeer(factor), cell, operands).check()


def test_memory_for_a_peer_is_aligned() -> None:
    assert all(
        aligned(size).ctypes.data % 64 == 0 and aligned(size).nbytes == size
        for size in (1, 64, 1000)
    )


def test_sizes_without_a_kernel_are_left_out_with_the_reason(
    make_cell: Callable[..., Cell],
) -> None:
    reason = GgmlPeer("TQ2_0", 35, "").serves(make_cell(in_features=160))
    assert reason == "K must be a multiple of 256"


@pytest.mark.parametrize("name", ["ggml TQ2_0", "ggml TQ1_0"])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_an_installed_peer_multiplies_right(
    name: str, rows: int, make_cell: Callable[..., Cell]
) -> None:
    peer = next(peer for peer in peers.PEERS if peer.name == name)
    reason = peer.available()
    if reason is not None:
        pytest.skip(reason)
    cell = make_cell(rows=rows, out_features=64, in_features=512, cold=True)
    contender = peer_contender(peer, cell, Operands(cell, 2))
    contender.check()
    assert contender.variant.copies * contender.variant.rotated_bytes > cell.cache_bytes
