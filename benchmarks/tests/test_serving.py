"""serving.py, with a model of thousands of weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from arb_ternary.errors import UsageProblem

SCRIPT = Path(__file__).parents[1] / "serving.py"


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("httpx2")
    import serving

    with pytest.raises(UsageProblem, match="there is no '3t'") as caught:
        serving.run(serving.ServingOptions(shapes=("3t",)), tmp_path)
    assert "125m" in caught.value.hint


@pytest.mark.extended
def test_both_servers_answer_all_requests(tmp_path: Path) -> None:
    for module in ("arb_ternary_serve", "gguf", "httpx2", "xllamacpp"):
        pytest.importorskip(module)
    # A process of its own: a test connects to nothing.
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    for option in ("shapes=[tiny]", "sequences=[1,3]", "prompt=8", "new_tokens=4", "rounds=1"):
        command += ["-o", option]
    subprocess.run([*command, "-o", "threads=1"], check=True, capture_output=True)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [row["sequences"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        for server in ("ours", "theirs"):
            times = row[server]
            assert 0 < times["first_token"] <= times["last_first_token"]
            # All tokens came after the first of them.
            assert 4 * row["sequences"] / times["tokens_per_second"] > times["last_first_token"]
    assert "llama.cpp" in (tmp_path / "table.md").read_text(encoding="utf-8")
