"""Where the float scales of a block's ternary matrices go, so that the block computes the same with
powers of two.

Let ``W = r T 2^E`` be a published matrix and ``T 2^E`` the stored one. Gains, norms and eps take
the factors ``r``:

* A gain in front of linears multiplies what they read. Let ``c`` be a factor of the pre-norm's
  gain; a stored linear then gives ``c / r`` times the published output.
* The scores of attention are the product of query and key. Without norms on them ``c^2 = r_q r_k``
  keeps the scores. With such norms any ``c`` does, because a norm takes the scale of what it reads
  away.
* ``norm(x, e) = norm(a x, a^2 e)``: where a scale is taken away, only the eps changes, by ``a^2``.
* What a linear writes through a norm's gain: ``r`` of the linear multiplies the gain in front of
  it.
* ``relu(.)^2`` is homogeneous: a factor ``a`` of its input is ``a^2`` of its output. ``silu`` is
  not: there ``c = r_gate``.

With sub-norms (``output_norm``, ``hidden_norm``) every factor has a place. Without, values and
output are linear, and so are up and down:

| | no sub-norms | left over |
|---|---|---|
| attention | ``c = sqrt(r_q r_k)`` | ``r_v r_o / c`` of ``output`` |
| attention with norms of queries and keys | ``c = r_v r_o`` | nothing |
| swiglu | ``c = r_gate`` | ``r_up r_down / c`` of ``down`` |
| reglu2 | ``c^3 = r_gate^2 r_up r_down`` | nothing |
| relu2 | ``c^2 = r_up^2 r_down`` | nothing |

All of it is exact up to the rounding of floats, in float and in int8 activations: the int8 of a
token do not change with a factor of all its features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from arb_ternary_text.models.architectures import Activation


@define
class Folded:
    """What becomes of a block's factors, by the path of the module within the block; factors of 1
    are left out.

    Attributes:
        gains: factors of gains.
        eps: factors of the eps of inner norms.
        biases: factors of the biases of queries, keys and values.
        left: factors that no norm takes, of linears.
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
        activation: of the feed-forward layer.
        sub_norms: whether what enters ``output`` and ``down`` is normalised.
        query_key_norm: whether queries and keys are.
    """
    r = {name: remainders.get(name, 1.0) for name in _MATRICES}
    found = Folded()
    _fold_attention(r, found, sub_norms=sub_norms, query_key_norm=query_key_norm)
    _fold_feed_forward(r, found, activation, sub_norms=sub_norms)
    for factors in (found.gains, found.eps, found.biases, found.left):
        for name in [name for name, factor in factors.items() if abs(factor - 1) < 1e-12]:
            del factors[name]
    return found


_MATRICES = (
    *(f"attention.{name}" for name in ("query", "key", "value", "output")),
    *(f"feed_forward.{name}" for name in ("gate", "up", "down")),
)


def _fold_attention(
    r: Mapping[str, float], found: Folded, *, sub_norms: bool, query_key_norm: bool
) -> None:
    query, key, value, output = (
        r[f"attention.{name}"] for name in ("query", "key", "value", "output")
    )
    c = math.sqrt(query * key)
    if query_key_norm:
        c = 1.0 if sub_norms else value * output
        found.eps["attention.query_norm"] = (c / query) ** 2
        found.eps["attention.key_norm"] = (c / key) ** 2
    found.gains["attention.norm"] = c
    for name, factor in (("query", query), ("key", key), ("value", value)):
        found.biases[f"attention.biases.{name}"] = c / factor
    if sub_norms:
        found.eps["attention.output_norm"] = (c / value) ** 2
        found.gains["attention.output_norm"] = output
    else:
        found.left["attention.output"] = value * output / c


def _fold_feed_forward(
    r: Mapping[str, float], found: Folded, activation: Activation, *, sub_norms: bool
) -> None:
    gate, up, down = (r[f"feed_forward.{name}"] for name in ("gate", "up", "down"))
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
