"""The command ``arb bench``: what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from arb_ternary.errors import UsageProblem
from arb_ternary_text import speed
from arb_ternary_text.cli.bench import bench
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.speed import Case, check_cases, measure, weight_bytes_per_token
from arb_ternary_train.cli.train import train

CASE = Case(threads=1, batch=3, prompt=5, new_tokens=2)


class Timed(torch.nn.Module):
    """A model of seven ids whose forward pass takes a second per token of each sequence."""

    sliding_window = None
    vocabulary_size = 7

    def __init__(self, clock: list[float], max_length: int = 100) -> None:
        super().__init__()
        self.clock = clock
        self.max_length = max_length
        self.read: list[tuple[int, ...]] = []

    def new_cache(self, batch_size: int) -> KeyValueCache:
        return KeyValueCache(1, batch_size, window=None, limit=self.max_length)

    def forward(self, tokens_BS: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        self.clock[0] += tokens_BS.size(1)
        self.read.append(tuple(tokens_BS.shape))
        return torch.zeros(*tokens_BS.shape, 7)


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rates_count_the_tokens_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    model = Timed(clock)
    done: list[int] = []
    found = measure(
        model,
        CASE,
        device=torch.device("cpu"),
        cache=None,
        repetitions=2,
        advance=lambda: done.append(1),
    )
    # 3 sequences of 5 tokens in 5 seconds, and 3 sequences of 2 tokens in 2 seconds.
    assert found.prompt_rates == [3.0, 3.0]
    assert found.decode_rates == [3.0, 3.0]
    assert model.read == [(3, 5), (3, 1), (3, 1)] * 3
    assert len(done) == 3


def _decoder(**options: object) -> Decoder:
    config = DecoderConfig(
        width=32, layers=2, heads=2, feed_forward=64, max_length=16, activations="float", **options
    )
    return Decoder(config, 50).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_counts_only_where_it_is_the_head(tied: bool) -> None:
    floats = ("embedding", "head", "norms", "linears")
    model = _decoder(float_parts=floats, tie_embeddings=tied, sub_norms=False)
    # Per layer four square projections, three of the feed-forward, and norms; then norm and head.
    feed_forward = 2 if model.config.feed_forward_activation == "relu2" else 3
    block = 4 * 32 * 32 + feed_forward * 32 * 64 + 2 * 32
    assert weight_bytes_per_token(model) == 4 * (2 * block + 32 + 50 * 32)


def test_the_share_of_experts_is_not_known() -> None:
    assert weight_bytes_per_token(_decoder(experts=2, experts_per_token=1)) is None


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(UsageProblem, match=r"are 7 tokens.*holds 6") as caught:
        check_cases(Timed([0.0], max_length=6), [CASE], "timed")
    assert "at most 6" in (caught.value.hint or "")
    assert check_cases(Timed([0.0], max_length=7), [CASE], "timed")


def test_a_format_that_the_model_cannot_keep_is_refused() -> None:
    options = {"device": torch.device("cpu"), "repetitions": 1, "advance": lambda: None}
    with pytest.raises(UsageProblem, match="not as 'int8'"):
        measure(Timed([0.0]), CASE, cache="int8", **options)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UsageProblem, match="'linear' does not write tokens"):
        check_cases(torch.nn.Linear(2, 2), [CASE], "linear")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    config = folder / "run.yaml"
    config.write_text(
        """
model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 32}
data: {name: shakespeare}
masking: {name: causal}
optimizer: {name: sign_votes}
phases: [{name: standard, steps: 1, batch_size: 2, block_size: 16}]
""",
        encoding="utf-8",
    )
    arguments = [str(config), "--run-dir", str(folder / "run")]
    result = CliRunner().invoke(train, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_BUFFER_BYTES", 1 << 20)


def _bench(run: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(bench, [str(run), "--repetitions", "1", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_every_combination_gets_a_row(run: Path) -> None:
    given = ("--prompt", "8,16", "--new-tokens", "4", "--batch", "1,2", "--threads", "1", "--json")
    facts = json.loads(_bench(run, *given).stdout)
    rows = [(row["batch"], row["prompt"], row["new_tokens"]) for row in facts["rows"]]
    assert rows == [(1, 8, 4), (1, 16, 4), (2, 8, 4), (2, 16, 4)]
    for row in facts["rows"]:
        rate = row["bytes_per_token"] * row["decode_tokens_per_second"] / row["batch"]
        assert row["share_of_read_bandwidth"] == pytest.approx(rate / facts["read_bandwidth"]["1"])
    assert facts["weight_bytes"] < facts["peak_bytes"]


def test_the_table_names_model_machine_and_memory(run: Path) -> None:
    text = _bench(run, "--prompt", "8", "--new-tokens", "4").stdout
    assert text.startswith(f"model    {run}: ")
    for title in ("machine", "memory", "reading", "write (tokens/s)", "of bandwidth"):
        assert title in text


@pytest.mark.parametrize("given", ["0", "a", "1,,2", "-1", "1.5"])
def test_only_whole_numbers_are_lengths(given: str, run: Path) -> None:
    result = CliRunner().invoke(bench, [str(run), f"--prompt={given}"])
    assert result.exit_code == 2
    assert "not a list of whole numbers" in result.output
