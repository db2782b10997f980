"""Generation: contenders read and write the same, and llama.cpp reads the file of random trits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from _generation.child import Session, measure_case, open_session
from _generation.shapes import SHAPES
from arb_ternary.errors import ArbError
from generation import main, obstacle
from harness.child import ask


def test_the_script_measures_every_contender(tmp_path: Path) -> None:
    command = ["--shapes", "tiny", "--prompts", "8", "--batches", "2", "--new-tokens", "3"]
    command += ["--contenders", "torch,tq2_0", "--threads", "1", "--seconds", "1e-3"]
    done = CliRunner().invoke(main, [*command, "--rounds", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "result.json").read_text())
    named = {row["name"]: row for row in result["rows"]}
    ours = named["torch"]
    if "llama.cpp TQ2_0" not in named:
        assert "not installed" in result["excluded"][0]["reason"]
        return
    theirs = named["llama.cpp TQ2_0"]
    speeds = [row["decode_tokens_per_second"] for row in (ours, theirs)]
    assert ours["decode_ratio"]["tq2_0"] == pytest.approx(speeds[0] / speeds[1])
    # Both read the same number of weights, of about two bits.
    read = [row["bytes_per_second"] / row["decode_tokens_per_second"] for row in (ours, theirs)]
    assert read[0] == pytest.approx(read[1], rel=0.01)


def test_sequences_are_read_one_after_the_other() -> None:
    """Tokens that are read in two passes give the logits of one pass."""
    for contender in ("torch", "bfloat16"):
        session = open_session(contender, SHAPES["tiny"], 16, 1)
        ids = np.random.default_rng(0).integers(0, 512, (2, 9))
        session.start(2, 16)
        whole = session.read(ids)
        session.start(2, 16)
        session.read(ids[:, :-1])
        assert np.array_equal(session.read(ids[:, -1:]), whole)


def test_llama_cpp_continues_a_sequence(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    from _generation.gguf_file import write_random_gguf

    file = tmp_path / "tiny.gguf"
    write_random_gguf(file, SHAPES["tiny"], "TQ2_0", 16)
    session = open_session("tq2_0", SHAPES["tiny"], 16, 1, str(file))
    ids = np.random.default_rng(0).integers(0, 512, (2, 9))
    session.start(2, 16)
    whole = session.read(ids)
    session.start(2, 16)
    session.read(ids[:, :-1])
    assert np.array_equal(session.read(ids[:, -1:]), whole)


def test_a_shape_without_whole_blocks_is_left_out() -> None:
    assert obstacle("tq2_0", SHAPES["0.6m"]) == "its rows are blocks of 256 weights"
    assert obstacle("torch", SHAPES["0.6m"]) is None


class Counting(Session):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read_tokens: list[tuple[int, ...]] = []

    def start(self, batch: int, length: int) -> None:
        assert (batch, length) == (2, 13)

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        self.read_tokens.append(tokens_BS.shape)
        return tokens_BS[:, -1]


def test_a_case_stops_after_a_few_tokens_that_take_too_long() -> None:
    session = Counting()
    found = measure_case(session, 5, 2, 8, 512, 0.0)
    assert session.read_tokens == [(2, 5), *[(2, 1)] * 4]
    assert (len(found["prompt_seconds"]), len(found["token_seconds"])) == (1, 4)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ArbError, match=r"case: its process ended with 1: .*no_such_module"):
        ask("no_such_module", {}, title="case", threads=1)
