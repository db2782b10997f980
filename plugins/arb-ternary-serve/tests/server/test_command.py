"""The command: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary_serve.cli.serve import _read_bytes, _sources
from arb_ternary_serve.server import bind, port_owner


def curl(origin: str, path: str, body: Any = None, *options: str) -> str:
    """Return what curl prints; a process of its own may use the network."""
    if body is not None:
        options += ("-H", "Content-Type: application/json", "-d", json.dumps(body))
    found = subprocess.run(
        ["curl", "-sS", "-N", "--max-time", "60", *options, origin + path],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout


def test_a_signal_ends_it_after_the_running_answers(serve: Any, run: Path, base_run: Path) -> None:
    serving = serve("--model", f"a={run}", "--model", f"b={base_run}", "--max-tokens", "400")
    said = "".join(serving.process.stdout.readline() for _ in range(3))
    assert "model a:" in said
    assert "model b:" in said
    assert "of weights" in said
    assert "400 tokens of an answer" in said
    listed = json.loads(curl(serving.origin, "/v1/models"))
    assert [each["id"] for each in listed["data"]] == ["a", "b"]
    body = {"model": "b", "prompt": "the", "max_tokens": 400, "temperature": 0, "stream": True}
    command = ["curl", "-sSN", "--max-time", "60", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(body), serving.origin + "/v1/completions"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as streaming:
        assert streaming.stdout is not None
        first = streaming.stdout.readline()
        serving.process.send_signal(signal.SIGTERM)
        rest = streaming.stdout.read()
    assert first.startswith("data: {")
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"' in rest
    assert serving.process.wait(60) == 0


def test_a_port_that_is_taken_names_its_owner(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 3
    shown = capsys.readouterr().err
    assert f"127.0.0.1 port {port}: Address already in use" in shown
    if sys.platform == "linux":
        assert f"by process {os.getpid()} (" in shown
    assert "--port" in shown
    assert port_owner(port) is None
    bind("127.0.0.1", 0).close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "requests need no key"),
        (["--host", "example.invalid"], "requests need no key"),
        (["--host", "nowhere.invalid", "--api-key-file", "good"], "is no address"),
        (["--api-key-file", "empty"], "there is no key in it"),
        (["--api-key-file", "umlaut"], "ASCII"),
        (["--max-body", "4 MBit"], "is no size"),
        (["--model", "a=b"], "Give either SOURCE or --model"),
    ],
)
def test_wrong_arguments_are_named(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, key in (("good", "k"), ("empty", " "), ("umlaut", "schlüssel")):
        Path(name).write_text(key, encoding="utf-8")
    assert main(["serve", str(run), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_sizes_and_names() -> None:
    sizes = {"7": 7, "4KiB": 4096, "2 MB": 2 << 20, "1.5g": 3 << 29, "1tib": 1 << 40}
    for text, number in sizes.items():
        assert _read_bytes(None, None, text) == number  # type: ignore[arg-type]
    assert _sources("runs/demo/", ()) == {"demo": "runs/demo/"}
    assert _sources("models/small.gguf", ()) == {"small": "models/small.gguf"}
    assert _sources(None, ("a=x=y", "b=z")) == {"a": "x=y", "b": "z"}


def test_help_loads_no_torch() -> None:
    program = (
        "import sys\nfrom arb_ternary.cli.main import main\n"
        "assert main(['serve', '--help']) == 0\nassert 'torch' not in sys.modules\n"
        "assert 'uvicorn' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
