"""Predict the result of upcycling a teacher: ternary linears, memory per phase, splits of heads."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from arb_ternary.backends.select import use_backend
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_train.build import undrawn
from arb_ternary_upcycle.recipe.outline import TeacherOutline
from arb_ternary_upcycle.recipe.student import student_section

#: Bytes per float parameter of AdamW's two moments and of a gradient.
_MOMENTS: Final = 8
_GRADIENT: Final = 4
#: Splits of a head that are shown: fractions 1/n of its features that are semantic and geometric.
_SPLITS: Final = ((1, 1), (2, 2), (2, 4), (4, 4))


def describe(outline: TeacherOutline) -> dict[str, Any]:
    """Describe a teacher and its student; no weights are read, and models are built without them.

    Returns:
        plain JSON: ``teacher``, ``linears``, ``stages`` and ``decoupled`` (sizes that fit, the
        smallest cache last).
    """
    config = outline.config
    options = student_section(config, {})
    del options["name"]
    teacher = _without_weights(config, outline.vocabulary_size)
    student = _without_weights(DecoderConfig(**options), outline.vocabulary_size)
    return {
        "teacher": {
            "source": outline.source,
            "architecture": config.architecture or "none that other programs have",
            "layers": config.layers,
            "width": config.width,
            "heads": config.heads,
            "kv_heads": config.key_heads,
            "head_dim": config.value_features,
            "feed_forward": config.hidden,
            "context": config.max_length,
            "vocabulary_size": outline.vocabulary_size,
            "tokenizer": None if outline.tokenizer is None else outline.tokenizer.get("kind"),
            "parameters": sum(parameter.numel() for parameter in teacher.parameters()),
            "notes": list(outline.notes),
        },
        "linears": _linears(student),
        "stages": _stages(teacher, student),
        "decoupled": _splits(config),
    }


def _without_weights(config: DecoderConfig, vocabulary_size: int) -> Decoder:
    with use_backend("torch"), torch.device("meta"), undrawn():
        return Decoder(config, vocabulary_size)


def _linears(student: Decoder) -> list[dict[str, Any]]:
    """Return the linears of a block, with the number of weights in all blocks.

    ``bits`` per weight include exponents, ``training_bits`` votes as well.
    """
    rows = []
    for name, module in ternary_modules(student.blocks[0]):
        shape = [module.shape.out_features, module.shape.in_features]
        if shape[0] == 1:  # a gain
            continue
        weights = shape[0] * shape[1]
        stored = module.weight.nbytes + module.exponent.nbytes
        votes = module.votes.nbytes + module.exponent_votes.nbytes
        rows.append(
            {
                "name": f"blocks.*.{name}",
                "shape": shape,
                "weights": weights * len(student.blocks),
                "bits": 8 * stored / weights,
                "training_bits": 8 * (stored + votes) / weights,
            }
        )
    return rows


def _stages(teacher: Decoder, student: Decoder) -> list[dict[str, Any]]:
    """Return bytes of weights in memory and on disk for each phase, without activations."""
    whole = _float_bytes(teacher)
    block = _float_bytes(teacher.blocks[0])
    ends = whole - block * len(teacher.blocks)
    counted = audit(student)
    trained = sum(row.nbytes for row in counted.rows)
    float_state = counted.float_parameters * (_MOMENTS + _GRADIENT)
    # Folding gives a tied head weights of its own.
    untied = whole + (teacher.embedding.weight.nbytes if teacher.config.tied else 0)
    return [
        {"phase": "load_teacher", "memory": whole, "disk": whole},
        {"phase": "fold_rotate", "memory": ends + 2 * block, "disk": untied},
        {"phase": "projection", "memory": trained + ends + 2 * block, "disk": trained},
        {"phase": "blockwise", "memory": trained + ends + 2 * block, "disk": trained},
        {"phase": "global", "memory": trained + float_state + whole, "disk": trained + float_state},
    ]


def _float_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _splits(config: DecoderConfig) -> list[dict[str, Any]]:
    """Return sizes of decoupled attention, each once; none if queries and keys are normalised."""
    if config.has_query_key_norm:
        return []
    head = config.value_features
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for semantic, geometric in _SPLITS:
        sem = max(1, head // semantic)
        geo = max(2, head // geometric // 2 * 2)
        found[sem, geo] = {
            "sem_dim": sem,
            "geo_dim": geo,
            "cache_features": (sem + geo + head) * config.key_heads,
            "of_teacher": (sem + geo + head) / (2 * head),
        }
    return list(found.values())
