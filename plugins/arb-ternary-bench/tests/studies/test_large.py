"""The study of fine-tuning a packed model of billions of weights, with one of thousands."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from arb_ternary.errors import UsageProblem
from arb_ternary_bench.generation.shapes import SHAPES
from arb_ternary_bench.studies import large
from arb_ternary_bench.study import Session


def test_a_shape_without_the_norms_of_bitnet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="'7b' has not the norms of BitNet") as caught:
        large.run(large.LargeOptions(shape="7b"), Session(tmp_path))
    assert "2b" in caught.value.hint


@pytest.mark.extended
def test_it_measures_a_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("arb_ternary_chat")
    tiny = evolve(SHAPES["tiny"], bitnet=True, tied=True)
    monkeypatch.setattr(large, "SHAPES", {"tiny": tiny})
    options = large.LargeOptions(shape="tiny", steps=2, conversations=30, words=3, threads=1)
    result = large.run(options, Session(tmp_path))
    # 2 blocks of 256 x (2 x 256 + 2 x 128 + 3 x 512), and 512 x 256 of the embedding.
    assert result["weights"] == 2 * 256 * (2 * 256 + 2 * 128 + 3 * 512) + 512 * 256
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 100 << 20
    assert result["exported_bytes"] > result["weights"] / 4
    assert (tmp_path / "tuned" / "hf" / "config.json").exists()
