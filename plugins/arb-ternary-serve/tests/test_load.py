"""A server under load: nobody gets another's answer, and its memory does not grow.

The long version, half an hour: ``pytest -m slow plugins/arb-ternary-serve/tests/test_load.py``.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arb_ternary import load_model

CLIENT = Path(__file__).with_name("load_client.py")
CLIENTS = 200
SEATS = 8
WAITING = 96
#: Bytes by which the server may grow after its first rounds: caches of the allocators of Python
#: and of torch, and the log probabilities of the last prompts.
GROWTH = 24 << 20
BAD = {
    "no JSON": {400},
    "nested": {400},
    # A client that goes on sending may lose the response.
    "100 MB": {413, "closed"},
    "byte per second": {408},
    "reads nothing": {None},
}


@pytest.fixture(scope="module")
def expected(plain_run: Path) -> Mapping[str, str]:
    """Texts that greedy answers repeat and continue, each as long as it is in the answer."""
    model = load_model(plain_run)
    draw = random.Random(0)
    texts = {}
    for _ in range(40):
        prompt = "".join(draw.choices("abcdefgh ijklmno", k=draw.randint(1, 80)))
        answer = model.generate(prompt, max_new_tokens=most_tokens(prompt), temperature=0)
        texts[prompt] = prompt + answer
    return texts


def most_tokens(prompt: str) -> int:
    """Return how long the answer to a prompt may be: from 1 to 60 tokens."""
    return 1 + len(prompt) * 7 % 60


def requests_for(prompts: Sequence[str], draw: random.Random) -> list[dict[str, Any]]:
    """Return requests of all clients, in many manners."""
    requests = []
    for _ in range(CLIENTS):
        prompt = draw.choice(prompts)
        body = {
            "prompt": prompt,
            "max_tokens": most_tokens(prompt),
            "temperature": 0,
            "echo": True,
            "stream": draw.random() < 0.5,
        }
        manner = draw.choices(["whole", "slow", "leave"], [6, 2, 2])[0]
        requests.append({"manner": manner, "body": body})
    return requests


def start_client(serving: Any, requests: Sequence[Mapping[str, Any]]) -> Any:
    """Start a process that sends requests."""
    process = subprocess.Popen(
        [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(serving.origin.rpartition(":")[2])
    assert process.stdin is not None
    json.dump({"port": port, "requests": requests}, process.stdin)
    process.stdin.close()
    return process


def outcomes_of(process: Any) -> Iterator[dict[str, Any]]:
    """Yield what became of the requests, as they end."""
    for line in process.stdout:
        yield json.loads(line)
    process.stdout.close()
    assert process.wait() == 0


def check_round(
    serving: Any, requests: Sequence[Mapping[str, Any]], expected: Mapping[str, str]
) -> int:
    """Check that all are answered rightly, or refused; return how many were answered."""
    outcomes = list(outcomes_of(start_client(serving, requests)))
    assert len(outcomes) == len(requests)
    answered = 0
    for outcome in outcomes:
        request = requests[outcome["index"]]
        status = outcome["status"]
        if request["manner"] in BAD:
            assert status in BAD[request["manner"]], (request, outcome)
        elif status == 429:
            assert outcome.get("retry_after", "2") == "2"
        else:
            assert status == 200, (request, outcome)
            if request["manner"] != "leave":
                assert outcome["text"] == expected[request["body"]["prompt"]]
                answered += 1
    return answered


def values(serving: Any) -> dict[str, float]:
    """Return what the server counts."""
    client = start_client(serving, [{"manner": "get", "path": "/metrics"}])
    (outcome,) = outcomes_of(client)
    lines = [line for line in outcome["text"].splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def wait_until_idle(serving: Any) -> dict[str, float]:
    """Wait until the server has noticed that the last clients have left."""
    counts = values(serving)
    for _ in range(100):
        if counts['arb_running{model="run"}'] == counts['arb_waiting{model="run"}'] == 0:
            return counts
        time.sleep(0.1)
        counts = values(serving)
    pytest.fail(f"sequences run although all clients have left: {counts}")


def memory_of(serving: Any) -> int:
    """Return the resident bytes of the server."""
    lines = Path(f"/proc/{serving.process.pid}/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@pytest.fixture
def serving(serve: Any, plain_run: Path) -> Any:
    return serve(
        plain_run, "--max-sequences", SEATS, "--max-waiting", WAITING, "--cache-memory", "64MiB"
    )


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read in /proc")


@linux
@pytest.mark.parametrize(
    "seconds", [0, pytest.param(1800, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_answer_is_another_s_and_memory_is_flat(
    serving: Any, expected: Mapping[str, str], seconds: float
) -> None:
    draw = random.Random(1)
    prompts = list(expected)
    started = time.monotonic()
    first = 0
    rounds = 0
    while rounds < 5 or time.monotonic() < started + seconds:
        # More answers than that may wait, but some of the clients come too late for one.
        assert check_round(serving, requests_for(prompts, draw), expected) > SEATS
        rounds += 1
        if rounds == 2:
            first = memory_of(serving)
    counts = wait_until_idle(serving)
    assert counts['arb_free_blocks{model="run"}'] == counts['arb_blocks{model="run"}']
    assert counts['arb_tokens_reused_total{model="run"}'] > 0
    grown = memory_of(serving) - first
    print(f"{rounds} rounds, {first >> 20} MiB after the second, and then {grown / 2**20:.1f} more")
    assert grown <= GROWTH


def test_bad_clients_disturb_nobody(
    serve: Any, plain_run: Path, expected: Mapping[str, str]
) -> None:
    serving = serve(plain_run, "--read-timeout", 3)
    draw = random.Random(2)
    good = requests_for(list(expected), draw)[:60]
    body = {**good[0]["body"], "max_tokens": 1000, "echo": False}
    bad = [{"manner": manner, "body": body} for manner in BAD]
    assert check_round(serving, [*bad, *good, *bad], expected) >= 40
    counts = wait_until_idle(serving)
    assert counts['arb_free_blocks{model="run"}'] == counts['arb_blocks{model="run"}']


def test_a_killed_server_leaves_the_run_as_it_was(
    serve: Any, serving: Any, plain_run: Path, expected: Mapping[str, str]
) -> None:
    before = checksums(plain_run)
    requests = requests_for(list(expected), random.Random(3))
    outcomes = outcomes_of(start_client(serving, requests))
    for outcome in outcomes:
        if outcome["status"] == 200:
            break
    serving.process.kill()
    # Every client gets its answer, a refusal, or the end of its connection.
    assert {outcome["status"] for outcome in outcomes} <= {200, 429, "failed"}
    assert checksums(plain_run) == before
    again = serve(plain_run)
    assert check_round(again, requests[:20], expected) >= 10


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
