"""The check ``kvcache``: bytes of keys and values per token of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define

from arb_ternary_text.models.attention import make_positions
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import KvCacheConfig
from arb_ternary_upcycle.verification.pair import open_pair
from arb_ternary_upcycle.verification.reports import judge

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_upcycle.float_model import FloatModel


def student_bytes_per_token(model: Decoder, device: torch.device) -> int:
    """Return the bytes per token that the cache of ``model`` holds, over all layers."""
    cache = model.new_cache(1)
    with torch.no_grad(), evaluation_mode(model):
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), cache)
    return cache.bytes_per_token()


def teacher_bytes_per_token(model: FloatModel) -> int:
    """Return the same for a float model on disk; its layers are all alike, so one is read."""
    config = model.config
    cache = KeyValueCache(1, 1, window=None, limit=None)
    x_11D = torch.zeros(1, 1, config.width)
    span = cache.reserve(1, 1)
    positions = make_positions(config, x_11D, start=0, total=1, window=None, span=span)
    with torch.no_grad():
        model.block(0)(x_11D, positions, cache.layers[0])
    return config.layers * cache.bytes_per_token()


@define(eq=False)
class KvCacheCheck:
    """Compares the caches of teacher and student in the number formats that this program uses."""

    config: KvCacheConfig

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``."""
        config = self.config
        pair = open_pair(context, config.teacher)
        teacher = teacher_bytes_per_token(pair.teacher)
        student = student_bytes_per_token(pair.student, pair.device)
        ratio = teacher / student
        metrics = {
            "teacher_bytes_per_token": float(teacher),
            "student_bytes_per_token": float(student),
            "reduction_ratio": ratio,
        }
        judged = judge("reduction ratio", ratio, config.min_reduction_ratio, at_most=False)
        details = {"teacher": str(pair.teacher.path)}
        return conclude(context, "kvcache", config, judged, metrics, details)
