"""A block with standard attention as one with decoupled attention: values, output and feed-forward
are copied.

Queries and keys of the planes that are kept become the geometric part, with the teacher's own
frequencies. The others, each times its constant, become the semantic part, in fewer features.
Scores of the teacher are divided by the root of ``head_dim``, those of decoupled attention by that
of ``sem_dim`` or ``geo_dim``, which the queries make good.

Shapes: ``H`` query heads, ``G`` key heads, ``P`` planes of a head, ``D`` width; ``E = D``, or ``D +
1`` where there are biases, which are the last column then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.surgery.factors import factorise

_BIASES = "attention.biases."


@frozen(eq=False)
class Split:
    """How a block's queries and keys are divided.

    Attributes:
        kept: planes of each key head that stay turned, int64 ``[G, K]``.
        constants: what the other planes of each query head are multiplied by, complex ``[H, P]``.
        root: ``E[x x^T]^1/2`` of what queries and keys read, float64 ``[E, E]``.
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
    """The tensors of a block of ``student`` from those of a block of ``teacher``, by their names
    inside it, float32.

    Args:
        tensors: the teacher's.
        teacher: its options.
        student: options with decoupled attention.
        split: see :class:`Split`.
        free: rows for semantic keys that no plane is left for, ``[sem_dim, D]``; their queries are
            0, so that they change nothing and can learn.
    """
    sem_dim = student.sem_dim or 0
    geo_dim = student.geo_dim or 0
    queries = _rows(tensors, "query", teacher.heads)
    keys = _rows(tensors, "key", teacher.key_heads)
    shared = teacher.heads // teacher.key_heads
    head_dim = queries.shape[1]
    parts: dict[str, list[Tensor]] = {name: [] for name in _PARTS}
    planes = torch.arange(head_dim // 2)
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
        spare = torch.nn.functional.pad(free[:more].double(), (0, key_rE.shape[1] - free.shape[1]))
        parts["query_semantic"].append(
            torch.nn.functional.pad(query_mrE, (0, 0, 0, more)).flatten(0, 1)
        )
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
    """What decoupled attention has too: everything but queries and keys."""
    gone = {f"{where}{name}" for where in ("attention.", _BIASES) for name in ("query", "key")}
    return {name: tensor for name, tensor in tensors.items() if name not in gone}


def drawn_parts(
    outline: Mapping[str, Tensor], generator: torch.Generator, *, fresh: bool
) -> dict[str, Tensor]:
    """Queries and keys as in a new decoder, of variance ``1 / D``; ``fresh``: values and output
    too.

    Args:
        outline: every tensor of a block of the student, for its shape.
        generator: what they are drawn from.
    """
    names = [*_PARTS, *(("value", "output") if fresh else ())]
    shapes = {
        name: outline[f"attention.{name}"].shape for name in names if f"attention.{name}" in outline
    }
    return {
        f"attention.{name}": torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        for name, shape in shapes.items()
    }


_PARTS = ("query_semantic", "query_geometric", "key_semantic", "key_geometric")


def _rows(tensors: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """The rows of each head's linear, float64 ``[heads, head_dim, E]``."""
    weight = tensors[f"attention.{name}"].double()
    bias = tensors.get(f"{_BIASES}{name}")
    if bias is not None:
        weight = torch.cat((weight, bias.double()[:, None]), dim=1)
    return weight.view(heads, -1, weight.shape[1])


def _features(planes_K: Tensor, head_dim: int) -> Tensor:
    """Both features of each plane: those of the real parts, then those of the imaginary ones."""
    return torch.cat((planes_K, planes_K + head_dim // 2))


def _times(rows_mFE: Tensor, constants_mK: Tensor) -> Tensor:
    """Queries times complex constants, so that their products with keys are ``Re(C z)``."""
    real, imaginary = rows_mFE.chunk(2, dim=1)
    a = constants_mK.real[..., None]
    b = constants_mK.imag[..., None]
    return torch.cat((a * real - b * imaginary, a * imaginary + b * real), dim=1)
