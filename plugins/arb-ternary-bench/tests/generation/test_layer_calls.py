"""The study of small linears within a layer's call: its arithmetic and its table."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from arb_ternary_text.models.decoder import Decoder


@pytest.fixture(scope="module")
def study() -> ModuleType:
    path = Path(__file__).parents[2] / "studies" / "layer_calls.py"
    module = ModuleType("layer_calls")
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        SourceFileLoader("layer_calls", str(path)).exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def test_a_linear_costs_what_a_block_more_does_over_its_seven(study: ModuleType) -> None:
    # A token of 5 us and 7 linears of 2 us in every block.
    rates = {layers: 1e6 / (5 + layers * 7 * 2) for layers in (1, 9)}
    assert study.seconds_of_a_linear(rates) == pytest.approx(2e-6)
    rows = [
        {"shape": f"256x{layers}", "contender": name, "decode_tokens_per_second_best": rate * speed}
        for layers, rate in rates.items()
        for name, speed in (("cpu", 1.0), ("tq2_0", 0.5))
    ]
    lonely = {"shape": "512x1", "contender": "cpu", "decode_tokens_per_second_best": 1.0}
    found = study.rows_of({"rows": [*rows, lonely]}, 2)
    assert [(row["width"], row["threads"], row["contender"]) for row in found] == [
        (256, 2, "cpu"),
        (256, 2, "tq2_0"),
    ]
    assert [row["seconds"] for row in found] == pytest.approx([2e-6, 4e-6])


def test_its_blocks_are_seven_square_linears_that_llama_cpp_takes_too(study: ModuleType) -> None:
    for width in study.WIDTHS:
        shape = study.shape_of(width, study.MANY)
        assert [(rows, columns) for _, rows, columns in shape.matrices()] == [
            (width, width)
        ] * study.LINEARS
        assert width % 256 == 0
    assert Decoder(study.shape_of(256, 1).config(64, 128), 256).config.feed_forward == 256


def test_the_table_marks_what_misses_the_goal_and_leaves_out_who_is_absent(
    study: ModuleType,
) -> None:
    machine = {"processor": "P", "cores": 2, "torch": "T", "llama_cpp": "L", "load_average": 0.1}
    rows = [
        {"threads": 1, "width": width, "contender": name, "seconds": micros * 1e-6}
        for width, name, micros in (
            (256, "cpu", 2.0),
            (256, "tq2_0", 2.2),
            (512, "cpu", 1.0),
            (512, "tq2_0", 3.0),
        )
    ]
    table = study.table({"machine": machine, "load_average_at_end": 0.2, "rows": rows})
    assert "| 256 x 256 | 1 | 2.00 | 2.20 | *1.10* |" in table
    assert "| 512 x 512 | 1 | 1.00 | 3.00 | 3.00 |" in table
