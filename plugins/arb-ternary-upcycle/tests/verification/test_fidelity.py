"""The checks ``fidelity`` and ``kvcache``, against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.verification.compare import CompareCheck
from arb_ternary_upcycle.verification.config import (
    CompareConfig,
    FidelityConfig,
    KvCacheConfig,
    Limits,
)
from arb_ternary_upcycle.verification.fidelity import FidelityCheck
from arb_ternary_upcycle.verification.kv_cache import KvCacheCheck

Run = Callable[..., Any]


def log_probabilities(model: Decoder, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        logits = model.eval()(tokens).double().numpy()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_fidelity_equals_a_plain_forward_pass(
    run: Run, report: Any, teacher: Decoder, student: Decoder
) -> None:
    context = run(student)
    result = FidelityCheck(FidelityConfig(batches=4, max_ppl_ratio=1e9)).check(context)
    data = [batch.data for batch in context.data.held_out(*context.evaluation_shape, 4)]
    both = [
        np.concatenate([log_probabilities(m, d[:, :-1]) for d in data]).reshape(-1, 256)
        for m in (teacher, student)
    ]
    targets = np.concatenate([d[:, 1:].numpy() for d in data]).ravel()
    nll = [-p[np.arange(len(targets)), targets].mean() for p in both]
    wanted = {
        "teacher_nll": nll[0],
        "student_nll": nll[1],
        "delta_nll": nll[1] - nll[0],
        "ppl_ratio": np.exp(nll[1]) / np.exp(nll[0]),
        "divergence": (np.exp(both[0]) * (both[0] - both[1])).sum(axis=1).mean(),
        "agreement": (both[0].argmax(axis=1) == both[1].argmax(axis=1)).mean(),
        "tokens": len(targets),
    }
    assert result.metrics == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert report(context, "fidelity")["metrics"] == result.metrics


def test_identical_models_have_delta_0_and_ratio_1(run: Run, teacher: Decoder) -> None:
    result = FidelityCheck(FidelityConfig(max_delta_nll=0.0, max_ppl_ratio=1.0)).check(run(teacher))
    assert result.passed
    assert (result.metrics["delta_nll"], result.metrics["ppl_ratio"]) == (0.0, 1.0)
    assert (result.metrics["divergence"], result.metrics["agreement"]) == (0.0, 1.0)


def test_delta_is_student_minus_teacher(
    run: Run, write_stage: Any, teacher: Decoder, student: Decoder
) -> None:
    """A student that knows the text better than its teacher has a negative delta, which passes."""
    context = run(student)
    delta = FidelityCheck(FidelityConfig(max_delta_nll=9.0)).check(context).metrics["delta_nll"]
    write_stage(context.directory / "stages" / "prepared", student)
    turned = (
        FidelityCheck(FidelityConfig(max_delta_nll=9.0))
        .check(evolved(context, teacher))
        .metrics["delta_nll"]
    )
    assert delta == pytest.approx(-turned)
    assert delta != 0


def evolved(context: Any, model: Decoder) -> Any:
    context.model = model
    return context


@pytest.mark.parametrize("limit", ["max_delta_nll", "max_ppl_ratio"])
def test_number_at_the_limit_passes(run: Run, student: Decoder, limit: str) -> None:
    context = run(student)
    measured = FidelityCheck(FidelityConfig(max_delta_nll=9.0)).check(context).metrics[limit[4:]]
    at = FidelityCheck(FidelityConfig(**{limit: measured})).check(context)
    above = FidelityCheck(FidelityConfig(**{limit: float(np.nextafter(measured, -9.0))})).check(
        context
    )
    assert (at.passed, above.passed) == (True, False)


def test_sample_sizes_follow_the_options(run: Run, student: Decoder) -> None:
    config = FidelityConfig(max_ppl_ratio=9.0, batches=2, batch_size=5, block_size=16)
    assert FidelityCheck(config).check(run(student)).metrics["tokens"] == 2 * 5 * 16


def test_config_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="'max_delta_nll' or 'max_ppl_ratio' must be given"):
        FidelityConfig()


def test_cache_bytes_follow_from_sizes(run: Run, report: Any, small: DecoderConfig) -> None:
    """2 key heads of 8 features, float32, in each of 2 layers: 256 bytes per token."""
    narrow = Decoder(
        evolve(small, kv_heads=1, float_parts=(), architecture=None, feed_forward=64), 256
    )
    context = run(narrow)
    result = KvCacheCheck(KvCacheConfig(min_reduction_ratio=2.0)).check(context)
    assert result.metrics == {
        "teacher_bytes_per_token": 2 * (2 * 8 + 2 * 8) * 4.0,
        "student_bytes_per_token": 2 * (1 * 8 + 1 * 8) * 4.0,
        "reduction_ratio": 2.0,
    }
    assert result.passed
    assert report(context, "kvcache")["passed"]
    assert (
        not KvCacheCheck(KvCacheConfig(min_reduction_ratio=float(np.nextafter(2.0, 3.0))))
        .check(context)
        .passed
    )


def test_decoupled_attention_caches_fewer_key_features(run: Run, small: DecoderConfig) -> None:
    """Each of 2 key heads in 2 layers has 2 + 4 features of the key and 8 of the value."""
    options = {
        "attention": "decoupled",
        "sem_dim": 2,
        "geo_dim": 4,
        "rotary_dim": 8,
        "architecture": None,
    }
    decoupled = Decoder(evolve(small, **options, activation="swiglu", sub_norms=False), 256)
    result = KvCacheCheck(KvCacheConfig(min_reduction_ratio=8 / 7)).check(run(decoupled))
    assert result.metrics["student_bytes_per_token"] == 2 * 2 * (2 + 4 + 8) * 4.0
    assert result.metrics["reduction_ratio"] == 8 / 7
    assert result.passed
    compared = CompareCheck(CompareConfig(attention=Limits(max_max_l1=1e9))).check(run(decoupled))
    assert compared.metrics["attention_max_l1"] > 0


def test_cache_ratio_of_the_same_model_is_1(run: Run, teacher: Decoder) -> None:
    result = KvCacheCheck(KvCacheConfig(min_reduction_ratio=1.0)).check(run(teacher))
    assert (result.passed, result.metrics["reduction_ratio"]) == (True, 1.0)
