"""Programs of others talk to the server: curl and llm, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arb_ternary import load_model

KEY = "a-key"


def output_of(*command: str, **environment: str) -> str:
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return found.stdout


def test_curl_and_llm_get_the_answer_of_the_model(serve: Any, run: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None or importlib.util.find_spec("llm") is None:
        pytest.skip("curl or llm is not installed")
    (tmp_path / "keys.txt").write_text(KEY)
    serving = serve("--model", f"tiny={run}", "--api-key-file", tmp_path / "keys.txt")
    turns = [{"role": "user", "content": "the cat"}]
    expected = load_model(run).generate(turns, temperature=0, max_new_tokens=8)

    body = {"messages": turns, "temperature": 0, "max_tokens": 8, "stream": True}
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
    address = f"{serving.origin}/v1/chat/completions"
    shown = output_of("curl", "-sSN", *headers, "-d", json.dumps(body), address)
    *events, last = [line for line in shown.split("\n\n") if line]
    assert last == "data: [DONE]"
    deltas = [json.loads(each.removeprefix("data: "))["choices"][0]["delta"] for each in events]
    assert "".join(delta.get("content", "") for delta in deltas) == expected

    described = {"model_id": "tiny", "model_name": "tiny", "api_key_name": "tiny"}
    described["api_base"] = f"{serving.origin}/v1"
    # YAML is a superset of JSON.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([described]))
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8", "--key", KEY, "-n"]
    for more in ([], ["--no-stream"]):
        answer = output_of(
            *(sys.executable, "-m", "llm", "-m", "tiny", *options, *more, "the cat"),
            LLM_USER_PATH=str(tmp_path),
            LLM_LOAD_PLUGINS="",
        )
        assert answer == expected + "\n"
