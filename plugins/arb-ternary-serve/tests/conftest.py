"""Tiny runs, and ``arb serve`` as a process of its own.

No test connects to a server by itself: a browser or another process does.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_test_support.byte_tokenizer import byte_tokenizer

BOS, EOS = 256, 257
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

CONFIG = """
name: tiny
data: {{name: text, path: {text}, tokenizer: {tokenizer}, validation_fraction: 0.2}}
model: {{name: decoder, {model}width: 32, layers: 2, heads: 2, feed_forward: 64,
  max_length: 4400}}
optimizer: {{name: scaled_votes, lr: 0.2}}
phases:
  - {{name: standard, steps: 8, batch_size: 4, block_size: 16, warmup_steps: 0, eval_every: 0}}
"""


def make_run(
    folder: Path, template: str | None, model: str = "architecture: qwen3, activations: float, "
) -> Path:
    """Train a decoder of bytes for some steps; return the run directory."""
    special = SpecialTokens(bos=BOS, eos=(EOS,), chat_template=template)
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(special).to_json()))
    text = CONFIG.format(text=folder / "text.txt", tokenizer=folder / "tokenizer.json", model=model)
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml").config
    train(config, RunRequest(directory=folder / "run", reporter=Silent))
    return folder / "run"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a chat template."""
    return make_run(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without one."""
    return make_run(tmp_path_factory.mktemp("base"), None)


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the usual decoder, whose sequences are decoded by one call of the backend."""
    return make_run(tmp_path_factory.mktemp("plain"), None, "")


@frozen
class Serving:
    """A server that runs: its process, and its address without a slash at the end."""

    process: subprocess.Popen[str]
    origin: str


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Serving]]:
    """Start ``arb serve`` with arguments on a free port; the fixture ends it."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> Serving:
        command = [sys.executable, "-m", "arb_ternary", "serve", "--port", "0", "--threads", "1"]
        process = subprocess.Popen(
            [*command, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://\S+:\d+", first)
        assert found is not None, first
        return Serving(process, found[0])

    yield start
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.communicate()
