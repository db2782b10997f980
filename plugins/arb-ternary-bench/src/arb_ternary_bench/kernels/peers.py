"""Peers: other people's kernels to compare with. None is installed with this package.

A peer is asked whether it can take part, prepares a weight in its own layout, and multiplies. Its
time is what its users pay: it gets float32 activations if the library quantises them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_bench.kernels.cells import Cell, Contender, check_close, poisoned
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_gemlite import GemlitePeer
from arb_ternary_bench.kernels.peer_ggml import GgmlPeer
from arb_ternary_bench.kernels.peer_product import PeerProduct
from arb_ternary_bench.kernels.timing import Variant

#: Largest error of a peer, in root mean squares of the result. Rounding Gaussian rows to int8
#: leaves errors of 0.9 %, and the largest of millions is six times as large.
_TOLERANCE: Final = 0.1


class Peer(Protocol):
    """A library's ternary (or comparable) matrix product.

    Attributes:
        name: what ``--peers`` calls it.
        summary: what it is and what its time includes.
        install: the command that installs it.
    """

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def install(self) -> str: ...

    def available(self) -> str | None:
        """Return why it cannot be used, or None, without loading it."""

    def serves(self, cell: Cell) -> str | None:
        """Return why it cannot multiply these sizes, or None."""

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        """Return the product with the weight in the peer's layout, in as many copies as needed."""


#: All peers on CPUs, in the order of listings.
PEERS: Final[tuple[Peer, ...]] = (
    GgmlPeer("TQ2_0", 35, "2.0625 bits per weight"),
    GgmlPeer("TQ1_0", 34, "1.6875 bits per weight"),
)
#: All peers on GPUs.
GPU_PEERS: Final[tuple[Peer, ...]] = (GemlitePeer(),)


def peers_on(device: str) -> tuple[Peer, ...]:
    """Return all peers for a kind of device."""
    return PEERS if device == "cpu" else GPU_PEERS


def choose_peers(request: str, device: str = "cpu") -> tuple[Peer, ...]:
    """Return the peers that ``auto``, ``none`` or names with commas ask for.

    ``auto`` takes those that are available.

    Raises:
        UsageProblem: a name is unknown, or names a peer that cannot be used.
    """
    known = {peer.name.lower(): peer for peer in peers_on(device)}
    names = [part.strip().lower() for part in request.split(",") if part.strip()]
    if names in ([], ["none"]):
        return ()
    if names == ["auto"]:
        return tuple(peer for peer in known.values() if peer.available() is None)
    chosen = []
    for name in dict.fromkeys(names):
        if name not in known:
            close = nearest(name, known)
            suggestion = f"did you mean {close!r}? " if close else ""
            raise UsageProblem(
                f"--peers: there is no peer {name!r}",
                f"{suggestion}peers: {', '.join(known)}; or auto, none",
            )
        reason = known[name].available()
        if reason is not None:
            raise UsageProblem(f"--peers: {name!r} cannot be used: {reason}", known[name].install)
        chosen.append(known[name])
    return tuple(chosen)


def list_peers(device: str = "cpu") -> list[dict[str, Any]]:
    """Return every peer, why it is unavailable, and the command that installs it."""
    listed = []
    for peer in peers_on(device):
        reason = peer.available()
        listed.append(
            {
                "name": peer.name,
                "summary": peer.summary,
                "available": reason is None,
                "reason": reason or "",
                "install": peer.install,
            }
        )
    return listed


def peer_contender(peer: Peer, cell: Cell, operands: Operands) -> Contender:
    """Make the peer a contender in a cell of the op ``linear``."""
    product = peer.prepare(cell, operands)
    return Contender(
        variant=Variant(
            name=peer.name,
            call=product.run,
            copies=product.copies,
            nbytes=product.weight_bytes + operands.x.nbytes + 4 * cell.rows * cell.out_features,
            operations=cell.product_operations,
            rotated_bytes=product.weight_bytes,
        ),
        role="peer",
        name=peer.name,
        check=_check(peer, product, cell, operands),
        checked="within tolerance",
        note=peer.summary,
    )


def _check(peer: Peer, product: PeerProduct, cell: Cell, operands: Operands) -> Callable[[], None]:
    def check() -> None:
        got = checked_output(product, cell)
        check_close(f"{cell.title}: {peer.name}", got, unit_product(operands), _TOLERANCE)

    return check


def checked_output(product: PeerProduct, cell: Cell) -> Tensor:
    """Return the output ``[M, N]`` of the last copy, whose memory held NaN before."""
    if product.output is not None:
        product.output.fill(float("nan"))
        product.run(product.copies - 1)
        return torch.from_numpy(product.output).clone()
    with poisoned(device=cell.device):
        found: Tensor = product.run(product.copies - 1)
    return found.to(torch.float32)


def unit_product(operands: Operands) -> Tensor:
    """Return ``x @ T.T``: peers have one scale per row or matrix, so exponents are left out."""
    return operands.x @ operands.trits.to(torch.float32).t()
