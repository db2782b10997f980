"""The study of formats of keys and values, with a model of thousands of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from arb_ternary_bench.child import run_arb
from arb_ternary_bench.studies import cache
from arb_ternary_bench.study import Session

CONFIG = """
data: {name: shakespeare}
model: {name: decoder, width: 32, layers: 2, heads: 2, kv_heads: 1, max_length: 24}
optimizer: {name: sign_votes}
phases:
  - {name: standard, steps: 20, batch_size: 8, block_size: 24}
"""


def test_it_compares_all_formats_on_the_same_tokens(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    run_arb(["train", str(config), "--run-dir", str(tmp_path / "run")], 1, tmp_path / "log")
    options = cache.CacheOptions(
        run=str(tmp_path / "run"), batches=2, batch_size=3, texts=4, prompt=8, threads=1
    )
    result = cache.run(options, Session(tmp_path))
    assert (result["tokens"], result["texts"], result["new_tokens"]) == (2 * 3 * 24, 4, 16)
    ways = {(each["computed"], each["cache"]): each for each in result["ways"]}
    first = ways["float32", "float"]
    assert (first["difference"], first["same_token"], first["same_texts"]) == (0, 1, 4)
    # Two layers with one head of 16 features for keys and values, and two scales with codes.
    assert {key: each["bytes_per_token"] for key, each in ways.items()} == {
        ("float32", "float"): 2 * 2 * 16 * 4,
        ("float32", "bfloat16"): 2 * 2 * 16 * 2,
        ("float32", "int8"): 2 * 2 * (16 + 4),
        ("bfloat16", "bfloat16"): 2 * 2 * 16 * 2,
    }
    for each in ways.values():
        assert each["perplexity"] == pytest.approx(first["perplexity"], rel=0.02)
        assert 0 <= each["tokens_before"] <= 16
    assert "144 held-out tokens" in cache.notes(result)[0]


def test_texts_are_compared_up_to_the_first_token_that_differs() -> None:
    found = cache._texts([[1, 2, 3], [1, 5, 3], [4, 2, 3]], [[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert found == {"same_texts": 1, "tokens_before": (3 + 1 + 0) / 3}
