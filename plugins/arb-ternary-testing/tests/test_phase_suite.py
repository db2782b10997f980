"""Run the suite that every phase must pass on the standard phase."""

from __future__ import annotations

from typing import ClassVar

from arb_ternary_testing import PhaseSuite


class TestStandard(PhaseSuite):
    component = "standard"


class TestStandardWithMicroBatches(PhaseSuite):
    component = "standard"
    options: ClassVar = {
        "steps": 4,
        "batch_size": 2,
        "block_size": 8,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "eval_every": 2,
        "eval_batches": 1,
    }
    steps = 4
    run: ClassVar = {
        "model": {
            "name": "decoder",
            "width": 32,
            "layers": 1,
            "heads": 2,
            "max_length": 32,
            "float_parts": ["head"],
        },
        "optimizer": {"name": "split", "ternary": {"name": "sign_votes", "accum_threshold": 2}},
    }
