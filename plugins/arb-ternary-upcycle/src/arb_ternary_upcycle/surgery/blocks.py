"""Turns a block with standard attention into one with decoupled attention.

Values, output and feed-forward layer are copied. Queries and keys of the rotary planes that are
kept become the geometric part, with the teacher's own frequencies. The others, each times its
constant, become the semantic part, in fewer features. The teacher's scores are divided by the root
of ``head_dim``, those of decoupled attention by the root of ``sem_dim`` or ``geo_dim``; factors of
the queries make up for it.

Shapes: ``H`` query heads, ``G`` key heads, ``P`` planes per head, ``D`` width; ``E = D``, or ``D +
1`` with biases, which are then the last column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.surgery.factors import factorise

_BIASES = "attention.biases."
_PARTS = ("query_semantic", "query_geometric", "key_semantic", "key_geometric")


@frozen(eq=False)
class Split:
    """How a block's queries and keys are divided.

    Attributes:
        kept: planes of each key head that stay rotary, int64 ``[G, K]``.
        constants: factors of the other planes of each query head, complex ``[H, P]``.
        root: ``E[x x^T]^1/2`` of the inputs of queries and keys, float64 ``[E, E]``.
    """

    kept: Tensor
    constants: Tensor
    root: Tensor


def split_block(
    tensors: Mapping[str, Tensor],
    teacher: DecoderConfig,
    student: DecoderConfig,
    split: Split,
    free: Tensor,
) -> dict[str, Tensor]:
    """Return the tensors of a block of ``student``, by their names inside it, float32.

    Args:
        tensors: those of the teacher's block.
        teacher: options of the teacher.
        student: options with decoupled attention.
        split: how to divide queries and keys.
        free: rows for semantic keys that no plane is left for, ``[sem_dim, D]``. Their queries are
            0, so that they change nothing at first and can learn.
    """
    sem_dim = student.sem_dim or 0
    geo_dim = student.geo_dim or 0
    queries = _rows(tensors, "query", teacher.heads)
    keys = _rows(tensors, "key", teacher.key_heads)
    shared = teacher.heads // teacher.key_heads
    head_dim = queries.shape[1]
    planes = torch.arange(head_dim // 2)

    parts: dict[str, list[Tensor]] = {name: [] for name in _PARTS}
    for group, kept_K in enumerate(split.kept):
        heads = slice(group * shared, (group + 1) * shared)
        own = queries[heads]
        constants_mP = split.constants[heads]
        dropped = planes[~torch.isin(planes, kept_K)]
        turned = _features(kept_K, head_dim)
        still = _features(dropped, head_dim)
        parts["query_geometric"].append(own[:, turned].flatten(0, 1))
        parts["key_geometric"].append(keys[group][turned])
        multiplied = _times(own[:, still], constants_mP[:, dropped])
        query_mrE, key_rE = factorise(multiplied, keys[group][still], split.root, sem_dim)
        more = sem_dim - key_rE.shape[0]
        spare = F.pad(free[:more].double(), (0, key_rE.shape[1] - free.shape[1]))
        parts["query_semantic"].append(F.pad(query_mrE, (0, 0, 0, more)).flatten(0, 1))
        parts["key_semantic"].append(torch.cat((key_rE, spare)))

    made = copied(tensors)
    factors = {
        "query_semantic": math.sqrt(sem_dim / head_dim),
        "query_geometric": math.sqrt(geo_dim / head_dim),
    }
    width = teacher.width
    for name, rows in parts.items():
        whole = torch.cat(rows) * factors.get(name, 1.0)
        made[f"attention.{name}"] = whole[:, :width].float()
        if whole.shape[1] > width:
            made[f"{_BIASES}{name}"] = whole[:, width].float()
    made["attention.planes"] = split.kept.to(torch.int16)
    return made


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what both kinds of attention have: everything but queries and keys."""
    gone = {f"{where}{name}" for where in ("attention.", _BIASES) for name in ("query", "key")}
    return {name: tensor for name, tensor in tensors.items() if name not in gone}


def drawn_parts(
    outline: Mapping[str, Tensor], generator: torch.Generator, *, fresh: bool
) -> dict[str, Tensor]:
    """Draw queries and keys as in a new decoder, of variance ``1 / D``.

    Args:
        outline: every tensor of a block of the student, for its shape.
        generator: draws them.
        fresh: draw values and output, too.
    """
    parts = (*_PARTS, "value", "output") if fresh else _PARTS
    drawn = {}
    for name in (f"attention.{part}" for part in parts):
        if name in outline:
            shape = outline[name].shape
            drawn[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
    return drawn


def _rows(tensors: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """Return the rows of each head's linear, float64 ``[heads, head_dim, E]``."""
    weight = tensors[f"attention.{name}"].double()
    bias = tensors.get(f"{_BIASES}{name}")
    if bias is not None:
        weight = torch.cat((weight, bias.double()[:, None]), dim=1)
    return weight.view(heads, -1, weight.shape[1])


def _features(planes_K: Tensor, head_dim: int) -> Tensor:
    """Return both features of each plane: first the real parts, then the imaginary ones."""
    return torch.cat((planes_K, planes_K + head_dim // 2))


def _times(rows_mFE: Tensor, constants_mK: Tensor) -> Tensor:
    """Multiply queries by complex constants, so that products with keys are ``Re(C z)``."""
    real, imaginary = rows_mFE.chunk(2, dim=1)
    a = constants_mK.real[..., None]
    b = constants_mK.imag[..., None]
    return torch.cat((a * real - b * imaginary, a * imaginary + b * real), dim=1)
