"""billions.py, with a model of thousands of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from _generation.shapes import SHAPES
from billions import TABLE, measure


@pytest.mark.extended
def test_it_measures_a_fine_tuning(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tiny = evolve(SHAPES["tiny"], bitnet=True, tied=True)
    result = measure(tmp_path, tiny, steps=2, threads=1)
    # 2 blocks of 256 x (2 x 256 + 2 x 128 + 3 x 512), and 512 x 256 of the embedding.
    assert result["weights"] == 2 * 256 * (2 * 256 + 2 * 128 + 3 * 512) + 512 * 256
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 100 << 20
    assert result["exported_bytes"] > result["weights"] / 4
    assert TABLE.rows(result)[0][0] == "1,310,720"
