"""What upcycling would make of a teacher: which linears become ternary, what each stage holds, how
heads can split.
"""

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

#: Bytes of AdamW's two moments and of a gradient, a float parameter.
_MOMENTS = 8
_GRADIENT = 4
#: Parts of a head's features that are shown as semantic and geometric ones, as denominators.
_SHARES: Final = ((1, 1), (2, 2), (2, 4), (4, 4))


def describe(outline: TeacherOutline) -> dict[str, Any]:
    """Plain JSON: ``teacher``, ``linears``, ``stages`` and ``decoupled`` (sizes that fit, smallest
    cache last).

    Nothing is read of the weights, and models are built without numbers.
    """
    config = outline.config
    size = outline.vocabulary_size
    section = {key: value for key, value in student_section(config, {}).items() if key != "name"}
    teacher = _outlined(config, size)
    student = _outlined(DecoderConfig(**section), size)
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
            "vocabulary_size": size,
            "tokenizer": None if outline.tokenizer is None else outline.tokenizer.get("kind"),
            "parameters": sum(parameter.numel() for parameter in teacher.parameters()),
            "notes": list(outline.notes),
        },
        "linears": _linears(student),
        "stages": _stages(teacher, student),
        "decoupled": _splits(config),
    }


def _outlined(config: DecoderConfig, vocabulary_size: int) -> Decoder:
    with use_backend("torch"), torch.device("meta"), undrawn():
        return Decoder(config, vocabulary_size)


def _linears(student: Decoder) -> list[dict[str, Any]]:
    """The linears of a block, with what all blocks have of each; bits a weight with exponents, and
    with votes.
    """
    rows = []
    for name, module in ternary_modules(student.blocks[0]):
        if module.shape.out_features == 1:  # a gain
            continue
        weights = module.shape.out_features * module.shape.in_features
        stored = module.weight.nbytes + module.exponent.nbytes
        kept = stored + module.votes.nbytes + module.exponent_votes.nbytes
        rows.append(
            {
                "name": f"blocks.*.{name}",
                "shape": [module.shape.out_features, module.shape.in_features],
                "weights": weights * len(student.blocks),
                "bits": 8 * stored / weights,
                "training_bits": 8 * kept / weights,
            }
        )
    return rows


def _stages(teacher: Decoder, student: Decoder) -> list[dict[str, Any]]:
    """What a phase holds of weights, beside activations, in bytes; ``disk`` is what it writes."""
    whole = _float_bytes(teacher)
    block = _float_bytes(teacher.blocks[0])
    ends = whole - block * len(teacher.blocks)
    counted = audit(student)
    held = sum(row.nbytes for row in counted.rows)
    float_state = counted.float_parameters * (_MOMENTS + _GRADIENT)
    # Folding gives a tied head weights of its own.
    untied = whole + (teacher.embedding.weight.nbytes if teacher.config.tied else 0)
    return [
        {"phase": "load_teacher", "memory": whole, "disk": whole},
        {"phase": "fold_rotate", "memory": ends + 2 * block, "disk": untied},
        {"phase": "projection", "memory": held + ends + 2 * block, "disk": held},
        {"phase": "blockwise", "memory": held + ends + 2 * block, "disk": held},
        {"phase": "global", "memory": held + float_state + whole, "disk": held + float_state},
    ]


def _float_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _splits(config: DecoderConfig) -> list[dict[str, Any]]:
    if config.has_query_key_norm:
        return []
    head = config.value_features
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for semantic, geometric in _SHARES:
        sem = max(1, head // semantic)
        geo = max(2, head // geometric // 2 * 2)
        features = (sem + geo + head) * config.key_heads
        found[sem, geo] = {
            "sem_dim": sem,
            "geo_dim": geo,
            "cache_features": features,
            "of_teacher": (sem + geo + head) / (2 * head),
        }
    return list(found.values())
