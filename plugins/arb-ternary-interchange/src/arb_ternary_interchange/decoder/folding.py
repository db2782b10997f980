"""Fold the float scales of a block's ternary matrices into gains and eps of its norms, so that the
block computes the same with powers of two.

Let ``W = r T 2^E`` be a published matrix and ``T 2^E`` the stored one. Gains and eps take the
factors ``r``:

* A gain in front of linears multiplies what they read. Let ``c`` be a factor of the pre-norm's
  gain; a stored linear then gives ``c / r`` times the published output.
* The scores of attention are the product of query and key. Without norms on them ``c^2 = r_q r_k``
  keeps the scores. With such norms any ``c`` does, because a norm takes the scale of its input
  away.
* ``norm(x, e) = norm(a x, a^2 e)``: if a norm takes a scale ``a`` away, only its eps changes, by
  ``a^2``.
* The ``r`` of a linear behind a norm multiplies the gain of that norm.
* ``relu(.)^2`` is homogeneous: a factor ``a`` of its input is ``a^2`` of its output. ``silu`` is
  not: there ``c = r_gate``.

With sub-norms (``output_norm``, ``hidden_norm``) every factor has a place. Without them, values and
output are linear, and so are up and down:

| | no sub-norms | left over |
|---|---|---|
| attention | ``c = sqrt(r_q r_k)`` | ``r_v r_o / c`` of ``output`` |
| attention with norms of queries and keys | ``c = r_v r_o`` | nothing |
| swiglu | ``c = r_gate`` | ``r_up r_down / c`` of ``down`` |
| reglu2 | ``c^3 = r_gate^2 r_up r_down`` | nothing |
| relu2 | ``c^2 = r_up^2 r_down`` | nothing |

All of it is exact up to the rounding of floats, with float and with int8 activations: the int8
codes of a token do not change if all its features are multiplied by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from arb_ternary_interchange.decoder.tensors import LINEARS
from arb_ternary_text.models.architectures import Activation


@define
class Folded:
    """The factors of a block after folding, by the path of the module in the block. Factors of 1
    are left out.

    Attributes:
        gains: factors of gains.
        eps: factors of the eps of inner norms.
        biases: factors of the biases of queries, keys and values.
        left: factors of linears that no norm takes.
    """

    gains: dict[str, float] = field(factory=dict)
    eps: dict[str, float] = field(factory=dict)
    biases: dict[str, float] = field(factory=dict)
    left: dict[str, float] = field(factory=dict)


def fold_block(
    remainders: Mapping[str, float],
    activation: Activation,
    *,
    sub_norms: bool,
    query_key_norm: bool,
) -> Folded:
    """Fold one block; see the module's docstring.

    Args:
        remainders: ``r`` by path (``attention.query``, ...); those left out are 1.
        activation: the activation of the feed-forward layer.
        sub_norms: whether the inputs of ``output`` and ``down`` are normalised.
        query_key_norm: whether queries and keys are normalised.
    """
    r = {name: remainders.get(name, 1.0) for name in LINEARS}
    found = Folded()
    _fold_attention(r, found, sub_norms=sub_norms, query_key_norm=query_key_norm)
    _fold_feed_forward(r, found, activation, sub_norms=sub_norms)
    for factors in (found.gains, found.eps, found.biases, found.left):
        for name in [name for name, factor in factors.items() if abs(factor - 1) < 1e-12]:
            del factors[name]
    return found


def _fold_attention(
    r: Mapping[str, float], found: Folded, *, sub_norms: bool, query_key_norm: bool
) -> None:
    query = r["attention.query"]
    key = r["attention.key"]
    value = r["attention.value"]
    output = r["attention.output"]
    c = math.sqrt(query * key)
    if query_key_norm:
        c = 1.0 if sub_norms else value * output
        found.eps["attention.query_norm"] = (c / query) ** 2
        found.eps["attention.key_norm"] = (c / key) ** 2
    found.gains["attention.norm"] = c
    found.biases["attention.biases.query"] = c / query
    found.biases["attention.biases.key"] = c / key
    found.biases["attention.biases.value"] = c / value
    if sub_norms:
        found.eps["attention.output_norm"] = (c / value) ** 2
        found.gains["attention.output_norm"] = output
    else:
        found.left["attention.output"] = value * output / c


def _fold_feed_forward(
    r: Mapping[str, float], found: Folded, activation: Activation, *, sub_norms: bool
) -> None:
    gate = r["feed_forward.gate"]
    up = r["feed_forward.up"]
    down = r["feed_forward.down"]
    # ``hidden``: the factor of what the sub-norm reads.
    if activation == "swiglu":
        c = gate
        hidden = c / up
    elif activation == "reglu2":
        c = 1.0 if sub_norms else math.cbrt(gate**2 * up * down)
        hidden = (c / gate) ** 2 * (c / up)
    else:
        c = 1.0 if sub_norms else up * math.sqrt(down)
        hidden = (c / up) ** 2
    found.gains["feed_forward.norm"] = c
    if sub_norms:
        found.eps["feed_forward.hidden_norm"] = hidden**2
        found.gains["feed_forward.hidden_norm"] = down
    else:
        found.left["feed_forward.down"] = down / hidden
