"""Servers on sockets of the file system: tests use no network."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attrs import frozen
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from arb_ternary import load_model
from arb_ternary_chat.model import Model
from arb_ternary_serve.app import Api, Limits
from arb_ternary_serve.engine import Engine
from arb_ternary_serve.gate import GateRules
from arb_ternary_serve.server import Server, listen
from arb_ternary_serve.worker import ModelWorker
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: pairs
data: {{name: text, path: {text}, tokenizer: {tokenizer}, validation_fraction: 0.2}}
model: {{name: decoder, width: 32, layers: 2, heads: 2, feed_forward: 64, max_length: 300}}
optimizer: {{name: scaled_votes, lr: 0.1}}
phases:
  - {{name: standard, steps: 2, batch_size: 2, block_size: 16, warmup_steps: 0, eval_every: 0}}
"""
#: Pairs of letters that are a token, so that texts can be cut within one.
PAIRS = ("th", "he", "at", "on", "an")


@pytest.fixture(scope="session")
def pairs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens are bytes and pairs of letters, without a chat template."""
    folder = tmp_path_factory.mktemp("pairs")
    vocabulary = {character: index for index, character in enumerate(BYTE_CHARACTERS)}
    for pair in PAIRS:
        vocabulary[pair] = len(vocabulary)
    library = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    (folder / "text.txt").write_text("the cat sat on the mat. " * 40)
    tokenizer = FileTokenizer(library.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    text = CONFIG.format(text=folder / "text.txt", tokenizer=folder / "tokenizer.json")
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml").config
    train(config, RunRequest(directory=folder / "run", reporter=Silent))
    return folder / "run"


@pytest.fixture(scope="session")
def chat_model(run: Path) -> Model:
    return load_model(run)


@pytest.fixture(scope="session")
def pairs_model(pairs_run: Path) -> Model:
    return load_model(pairs_run)


@frozen
class Running:
    """A server that runs in a thread.

    Attributes:
        client: sends requests to it.
        server: the server.
        workers: its models by name.
        records: what it has logged.
        path: its socket.
    """

    client: httpx2.Client
    server: Server
    workers: Mapping[str, ModelWorker]
    records: list[Mapping[str, Any]]
    path: str

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request that is answered."""
        response = self.client.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def problem(self, status: int, path: str, **body: Any) -> Any:
        """Return the error of a request that is refused."""
        response = self.client.post(f"/v1/{path}", json=body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream, but for the last, which is always the same."""
        response = self.client.post(f"/v1/{path}", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, last, end = response.text.split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def connect(self) -> socket.socket:
        """Return a connection."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        connection.settimeout(60)
        return connection


def worker_of(
    name: str,
    model: Model,
    report: Callable[[str, BaseException], object],
    make_engine: Callable[[], Engine] | None = None,
    *,
    max_sequences: int = 4,
    max_waiting: int = 64,
) -> ModelWorker:
    """Return a worker with a small engine."""

    def make() -> Engine:
        return Engine(model.causal, max_sequences=max_sequences, cache_bytes=1 << 21)

    return ModelWorker(
        name,
        model,
        make_engine or make,
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        report=report,
    )


@contextmanager
def running(
    workers: list[ModelWorker], limits: Limits | None = None, rules: GateRules | None = None
) -> Iterator[Running]:
    """Run a server in a thread."""
    limits = limits or Limits()
    records: list[Mapping[str, Any]] = []
    api = Api(workers, limits, rules or GateRules(), records.append)
    server = Server(api, workers, limits.read_seconds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = f"{folder}/socket"
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(path)
        listen(bound)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        transport = httpx2.HTTPTransport(uds=path)
        client = httpx2.Client(transport=transport, base_url="http://localhost", timeout=60)
        stack.enter_context(client)
        by_name = {worker.name: worker for worker in workers}
        try:
            yield Running(client, server, by_name, records, path)
        finally:
            client.close()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def both(chat_model: Model, pairs_model: Model) -> Iterator[Running]:
    """A server of the two models."""
    failures: list[Any] = []
    workers = [
        worker_of("chat", chat_model, lambda *failure: failures.append(failure)),
        worker_of("pairs", pairs_model, lambda *failure: failures.append(failure)),
    ]
    with running(workers) as server:
        yield server
    assert not failures


@pytest.fixture(name="running", scope="session")
def _running() -> Callable[..., Any]:
    """Run a server in a thread: see the function of that name."""
    return running


@pytest.fixture(name="worker_of", scope="session")
def _worker_of() -> Callable[..., ModelWorker]:
    """Return a worker with a small engine: see the function of that name."""
    return worker_of
