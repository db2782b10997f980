"""The study of models that were made ternary and not trained, with a model of thousands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from arb_ternary_bench.child import run_arb
from arb_ternary_bench.studies import projection
from arb_ternary_bench.study import Session

TEACHER = """
data: {name: shakespeare}
model:
  name: decoder
  width: 64
  layers: 2
  heads: 2
  kv_heads: 2
  feed_forward: 128
  activation: swiglu
  sub_norms: false
  max_length: 64
  float_parts: [embedding, head, norms, linears]
optimizer: {name: adamw, lr: 0.01}
phases:
  - {name: standard, steps: 120, batch_size: 16, block_size: 64}
"""


@pytest.mark.extended
def test_it_compares_all_ways_on_the_same_text(tmp_path: Path) -> None:
    pytest.importorskip("arb_ternary_trainers")
    pytest.importorskip("arb_ternary_upcycle")
    pytest.importorskip("transformers")
    config = tmp_path / "config.yaml"
    config.write_text(TEACHER, encoding="utf-8")
    run_arb(["train", str(config), "--run-dir", str(tmp_path / "run")], 2, tmp_path / "log")
    options = projection.ProjectionOptions(
        model=str(tmp_path / "run"), samples=32, held_out=16, length=64, threads=2
    )
    result = projection.run(options, Session(tmp_path / "study"))
    found = {each["way"]: each["perplexity"] for each in result["ways"]}
    # A model that has learnt something, and one that says nothing about 256 bytes.
    assert found["float"] < 20
    assert found["float"] < found["gptq"] < found["absmean"] < 256
    # Both round the same weights with the same samples, but not in the same precision.
    assert math.isclose(math.log(found["gptq"]), math.log(found["upcycle"]), abs_tol=0.05)
