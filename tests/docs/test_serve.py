"""What docs/how-to/serve.md says to a server is answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arb_ternary.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8080"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.S)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a tiny run, started as the page does."""
    folder = tmp_path_factory.mktemp("serve")
    config = ROOT / "docs" / "examples" / "demo.yaml"
    small = ["model.width=64", "model.layers=1", "model.heads=2", "model.feed_forward=64"]
    small += ["phases.0.steps=1", "phases.0.batch_size=1", "phases.0.block_size=32"]
    small += ["phases.0.eval_every=0", "phases.0.warmup_steps=0", "backend=torch"]
    overrides = [word for each in small for word in ("-o", each)]
    run = folder / "runs" / "first"
    assert main(["train", str(config), "--run-dir", str(run), *overrides]) == 0
    line = block("console").splitlines()[1]
    command = [sys.executable, "-m", "arb_ternary", *line.split()[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert address is not None
        yield address[0]
        process.terminate()
        assert process.wait(60) == 0


def test_the_commands_of_the_page_are_answered(origin: str) -> None:
    command = block("bash").replace(ADDRESS, origin)
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    answer = json.loads(shown.stdout)
    assert answer["model"] == "first"
    assert answer["usage"]["completion_tokens"] == 30
    program = block("python").replace(ADDRESS, origin)
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert written.stdout


def test_the_options_and_fields_of_the_page_exist() -> None:
    from arb_ternary_serve.cli.serve import serve
    from arb_ternary_serve.protocol import BODIES, IGNORED

    options = {option for each in serve.params for option in each.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= options
    fields = {*BODIES["completion"]["properties"], *BODIES["chat"]["properties"]}
    taken = PAGE.partition("Both take ")[2].partition("Without")[0]
    assert {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", taken)} <= fields
    paragraph = PAGE.partition("`user`")[2].partition("have no effect")[0]
    ignored = {"user", *re.findall(r"`([a-z_]+)`", paragraph)}
    assert ignored | {"prompt_cache_retention"} == set(IGNORED)
