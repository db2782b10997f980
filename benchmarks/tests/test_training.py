"""Training: runs are timed, and one that does not learn is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from _training.methods import Method
from _training.sizes import SIZES
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.manager import manager
from arb_ternary_train.loading import structure_run
from training import check_learning, main, with_ratios


def test_the_script_times_runs_of_arb_train(tmp_path: Path) -> None:
    command = ["--sizes", "tiny", "--methods", "torch/int8", "--threads", "1"]
    command += ["--steps", "12", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    (cell,) = json.loads((tmp_path / "result.json").read_text())["cells"]
    (votes,) = cell["rows"]
    assert votes["steps"] == 12
    assert votes["tokens_per_second"] == pytest.approx(32 / votes["seconds_min"])
    # 16 of AdamW for embedding and head, little more than 1 for the linears.
    assert 1.3 < votes["state_bytes_per_parameter"] < 15
    assert votes["peak_bytes"] > 1 << 20


@pytest.mark.parametrize(
    "name",
    ["torch", "torch/pure/int8", "torch/int8/all-bfloat16", "qat/compiled", "bfloat16"],
)
def test_every_kind_of_method_is_a_config(name: str) -> None:
    plain = Method(name).config(SIZES["512x8"], "tokens.npy", 8, "cpu")
    config = structure_run(Document(plain, name), manager().registry).config
    assert config.phases[0].options.steps == 8


def test_a_loss_that_does_not_fall_is_refused(tmp_path: Path) -> None:
    def losses(*values: float) -> None:
        events = [json.dumps({"event": "train", "loss": value}) for value in values]
        (tmp_path / "metrics.jsonl").write_text("\n".join(events))

    losses(2.0, 2.5, 1.5)
    check_learning("method", tmp_path)
    losses(2.0, 2.5)
    with pytest.raises(ArbError, match="never fell below 2"):
        check_learning("method", tmp_path)


def test_ratios_are_to_the_fastest_float_method() -> None:
    rows = [
        {"role": "votes", "seconds_min": 1.0},
        {"role": "float", "seconds_min": 2.0},
        {"role": "float", "seconds_min": 3.0},
    ]
    assert [row["x_float"] for row in with_ratios(rows)] == [2.0, 1.0, 2 / 3]
    assert rows[0]["x_qat"] is None
