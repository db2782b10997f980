"""``arb bench generate``: what is measured, what it is divided by, and what is left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import asdict, evolve
from click.testing import CliRunner
from numpy.typing import NDArray

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import ArbError
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_bench.cli.bench import bench
from arb_ternary_bench.generation import bench as bench_module
from arb_ternary_bench.generation import cases as cases_module
from arb_ternary_bench.generation import child, contenders
from arb_ternary_bench.generation.bench import GenerateBench, run_generate_bench
from arb_ternary_bench.generation.cases import Case, measure_case
from arb_ternary_bench.generation.contenders import Contender, needed_bytes, obstacle, open_session
from arb_ternary_bench.generation.decoders import DecoderSession, bfloat16_decoder, ternary_decoder
from arb_ternary_bench.generation.gguf_file import _random_blocks, file_bytes, write_random_gguf
from arb_ternary_bench.generation.llama_cpp import LlamaCpp
from arb_ternary_bench.generation.result import TABLE
from arb_ternary_bench.generation.shapes import SHAPES, GenerationShape
from arb_ternary_bench.kernels import cache as cache_module
from arb_ternary_bench.kernels.cache import Cache
from arb_ternary_text.models.decoder import Decoder

TINY = SHAPES["tiny"]
BITNET = evolve(TINY, name="tiny bitnet", tied=True, bitnet=True)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "millions"),
    [("0.6m", 0.557), ("125m", 123.6), ("1b", 1100.0), ("2b", 2412.8), ("7b", 6738.1)],
)
def test_the_shapes_have_the_weights_of_their_models(name: str, millions: float) -> None:
    assert SHAPES[name].weights() / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("shape", [TINY, BITNET], ids=["llama", "bitnet"])
def test_the_weights_of_a_shape_are_those_of_the_decoder(shape: GenerationShape) -> None:
    with use_backend("torch"):
        decoder = Decoder(shape.config(16, "row"), shape.vocabulary)
    sizes = [
        module.shape.out_features * module.shape.in_features
        for _, module in ternary_modules(decoder)
    ]
    assert sum(sizes) == shape.weights()
    assert len(decoder.blocks) == shape.layers


@pytest.mark.parametrize("shape", [TINY, BITNET], ids=["llama", "bitnet"])
def test_pass_reads_packed_blocks_and_head_but_no_embedding(
    shape: GenerationShape,
) -> None:
    session = DecoderSession(ternary_decoder(shape, 16, 64, "torch"))
    # torch's layout has four trits per byte and an exponent per group; an embedding one per row.
    blocks = shape.layers * sum(n * k for _, n, k in shape.matrices())
    head = shape.vocabulary * shape.width
    head_exponents = shape.vocabulary if shape.tied else head / 64
    assert session.weight_bytes == (blocks + head) / 4 + blocks / 64 + head_exponents
    assert DecoderSession(bfloat16_decoder(shape, 16)).weight_bytes == 2 * (blocks + head)


def test_a_third_of_drawn_trits_is_zero_and_no_block_is_shared() -> None:
    decoder = ternary_decoder(TINY, 16, "row", "torch")
    assert len(decoder.blocks) == TINY.layers
    for _, module in ternary_modules(decoder):
        assert float((module.trits() == 0).float().mean()) == pytest.approx(1 / 3, abs=0.02)
    starts = {module.weight.data_ptr() for _, module in ternary_modules(decoder)}
    assert len(starts) == 2 + 7 * TINY.layers


def test_float_decoder_is_bfloat16_with_unit_variance() -> None:
    decoder = bfloat16_decoder(BITNET, 16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not list(decoder.buffers())
    down = decoder.blocks[1].feed_forward.down.weight
    assert float(down.detach().float().std()) == pytest.approx(512**-0.5, rel=0.05)
    logits = decoder(torch.arange(6)[None])
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("shape", [TINY, BITNET], ids=["llama", "bitnet"])
def test_a_session_writes_what_whole_passes_find_likeliest(shape: GenerationShape) -> None:
    decoder = ternary_decoder(shape, 16, "row", "torch")
    session = DecoderSession(decoder)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (2, 5))
    session.start(2, 8)
    seen = torch.from_numpy(tokens)
    written = session.read(tokens)
    for _ in range(3):
        with torch.no_grad():
            wanted = decoder(seen)[:, -1].argmax(dim=-1)
        np.testing.assert_array_equal(written, wanted.numpy())
        seen = torch.cat((seen, wanted[:, None]), dim=1)
        written = session.read(written[:, None])


class Slow:
    """A session on which every token of a sequence takes a second of a clock of its own."""

    weight_bytes = 1000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.started = []
        self.shapes = []
        monkeypatch.setattr(
            cases_module, "CLOCKS", {"wall": lambda: self.now, "processor": lambda: 2 * self.now}
        )

    def start(self, batch: int, length: int) -> None:
        self.started.append((batch, length))
        self.now += 100.0  # no part of any figure

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        self.shapes.append(tokens_BS.shape)
        self.now += tokens_BS.shape[1]
        return tokens_BS[:, -1]


def test_prompt_and_tokens_are_timed_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch)
    found = measure_case(slow, Case(prompt=16, batch=3, new_tokens=8), 50, seconds=20.0)
    assert slow.started == [(3, 24)]
    assert slow.shapes == [(3, 16), *[(3, 1)] * 7]
    assert found["prompt_seconds"] == [16.0]
    assert found["token_seconds"] == [1.0] * 7
    computed = measure_case(
        slow, Case(prompt=16, batch=3, new_tokens=8), 50, seconds=20.0, clock="processor"
    )
    assert (computed["prompt_seconds"], computed["token_seconds"]) == ([32.0], [2.0] * 7)
    assert found["resident_bytes"] > 10 * MIB


def test_case_fits_its_repetitions_and_tokens_into_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch)
    found = measure_case(slow, Case(prompt=1, batch=1, new_tokens=50), 50, seconds=105.0)
    assert found["prompt_seconds"] == [1.0]
    assert len(found["token_seconds"]) == 49
    again = measure_case(slow, Case(prompt=1, batch=1, new_tokens=50), 50, seconds=160.0)
    assert len(again["prompt_seconds"]) == 2
    hurried = measure_case(slow, Case(prompt=1, batch=1, new_tokens=50), 50, seconds=2.0)
    assert len(hurried["token_seconds"]) == 4


# --- the whole bench

#: Seconds of a prompt and of a pass, by contender.
TIMES: Mapping[str, tuple[float, float]] = {
    "torch": (1.0, 0.01),
    "tq2_0": (4.0, 0.03),
    "bfloat16": (2.0, 0.08),
}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the processes; notes who has a turn."""
    turns: list[str] = []
    drifting = itertools.count(1)

    def measured(contender: Contender, _shape: Any, cases: Any, **_options: Any) -> dict[str, Any]:
        turns.append(contender.name)
        prompt, token = TIMES[contender.name]
        ended = {
            "prompt_seconds": [prompt, 9.0],
            "token_seconds": [token, token, 9.0],
            "resident_bytes": 100 * MIB,
        }
        late = {"left_out": "its prompts would take about 200 s"}
        found = [
            late if contender.name == "bfloat16" and case.batch == 8 else ended for case in cases
        ]
        return {"base_bytes": 40 * MIB, "weight_bytes": 3_000_000, "cases": found}

    def bandwidth(*_arguments: Any) -> dict[str, Any]:
        turns.append("bandwidth")
        return {"bytes_per_second": 1e9 * next(drifting), "how": "read"}

    monkeypatch.setattr(bench_module, "measure_contender", measured)
    monkeypatch.setattr(bench_module, "measure_bandwidth", bandwidth)
    monkeypatch.setattr(bench_module, "missing", lambda name: None)
    monkeypatch.setattr(bench_module, "write_random_gguf", lambda path, *_: path.touch())
    return turns


def small(**changes: Any) -> GenerateBench:
    options: dict[str, Any] = {
        "shapes": (TINY,),
        "contenders": ("torch", "tq2_0", "bfloat16"),
        "prompts": (100,),
        "batches": (1, 8),
        "new_tokens": 4,
    }
    return GenerateBench(**{**options, **changes})


def test_contenders_take_turns_and_rates_are_medians(
    processes: list[str],
) -> None:
    result = run_generate_bench(small(rounds=2))
    assert processes == ["bandwidth", "torch", "tq2_0", "bfloat16"] * 2
    ours, theirs, floats = (row for row in result["rows"] if row["batch"] == 1)
    assert [row["name"] for row in (ours, theirs, floats)] == [
        "torch",
        "llama.cpp TQ2_0",
        "torch bfloat16",
    ]
    # Of [1, 9, 1, 9] seconds for 100 tokens; the median of six passes is that of the four quick
    # ones.
    assert (ours["prefill_tokens_per_second"], ours["prefill_tokens_per_second_best"]) == (
        20.0,
        100.0,
    )
    assert ours["decode_tokens_per_second"] == pytest.approx(100.0)
    assert ours["first_token_seconds"] == 5.0
    assert (ours["prompts_read"], ours["passes"]) == (4, 6)
    assert ours["decode_ratio"] == pytest.approx({"tq2_0": 3.0, "bfloat16": 8.0})
    assert ours["prefill_ratio"]["tq2_0"] == pytest.approx(6.5 / 5.0)
    # 3 MB in 10 ms, compared with the better of 1 and 2 GB/s.
    assert ours["of_read_bandwidth"] == pytest.approx(0.15)
    eight = next(row for row in result["rows"] if row["batch"] == 8)
    assert eight["decode_tokens_per_second"] == pytest.approx(800.0)
    assert eight["of_read_bandwidth"] == pytest.approx(0.15)


def test_what_would_take_too_long_is_left_out_with_the_reason(processes: list[str]) -> None:
    result = run_generate_bench(small())
    assert processes
    assert [row["name"] for row in result["rows"] if row["batch"] == 8] == [
        "torch",
        "llama.cpp TQ2_0",
    ]
    assert result["excluded"] == [
        {
            "shape": "tiny, prompt 100, batch 8",
            "name": "torch bfloat16",
            "reason": "its prompts would take about 200 s",
        }
    ]
    assert (
        "batch 8: torch bfloat16 is left out: its prompts would take about 200 s."
        in TABLE.markdown(result)
    )


def test_what_the_machine_has_no_room_for_is_left_out(
    processes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "available_bytes", lambda: 1 << 30)
    result = run_generate_bench(small())
    assert processes == []
    assert result["rows"] == []
    assert result["read_bandwidth"] is None
    assert {each["reason"] for each in result["excluded"]} == {
        "it takes about 1.5 GiB of memory; 1.0 GiB are available"
    }
    assert "Share of the read bandwidth" in "\n".join(TABLE.notes(result))


def test_failing_peer_is_left_out_but_a_backend_is_an_error(
    processes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_module.measure_contender

    def failing(name: str) -> Callable[..., dict[str, Any]]:
        def measured(contender: Contender, *arguments: Any, **options: Any) -> dict[str, Any]:
            if contender.name == name:
                raise ArbError("it ended with -9", "the last line")
            return real(contender, *arguments, **options)

        return measured

    monkeypatch.setattr(bench_module, "measure_contender", failing("tq2_0"))
    result = run_generate_bench(small(rounds=2))
    assert processes == ["bandwidth", "torch", "bfloat16"] * 2
    assert result["excluded"][0] == {
        "shape": "tiny",
        "name": "llama.cpp TQ2_0",
        "reason": "it ended with -9",
    }
    assert result["rows"][0]["decode_ratio"]["tq2_0"] is None
    monkeypatch.setattr(bench_module, "measure_contender", failing("torch"))
    with pytest.raises(ArbError, match="it ended with -9"):
        run_generate_bench(small())


def test_llama_cpp_needs_its_package_and_rows_of_whole_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contenders, "installed", lambda: None)
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    assert contenders.missing("tq2_0") == "xllamacpp is not installed: pip install xllamacpp gguf"
    assert contenders.missing("bfloat16") is None
    theirs = Contender(name="tq1_0", group_size=128, threads=1)
    assert (
        obstacle(theirs, SHAPES["0.6m"])
        == "its rows are blocks of 256 weights, and 128 is not a multiple"
    )
    assert obstacle(theirs, SHAPES["2b"]) is None
    assert obstacle(evolve(theirs, name="torch"), SHAPES["0.6m"]) is None


def test_memory_is_requested_for_weights_and_cache_only() -> None:
    gib = 2.0**30
    seven = SHAPES["7b"]
    cached = 2 * 32 * 640 * 4096
    ours = needed_bytes(Contender(name="torch", group_size=128, threads=1), seven, 640, 1)
    assert ours / gib == pytest.approx(
        1.5 + (6.738e9 * (0.25 + 2 / 128) + 4 * 4096 * 32000 + 2 * cached) / gib, rel=1e-3
    )
    rounded = needed_bytes(
        Contender(name="torch/int8-cache", group_size=128, threads=1), seven, 640, 1
    )
    assert ours - rounded == pytest.approx((2 - 1 - 1 / 8 - 8 / seven.layers) * cached)
    as_computed = needed_bytes(
        Contender(name="torch/float-cache", group_size=128, threads=1), seven, 640, 1
    )
    assert as_computed - ours == pytest.approx(2 * cached)
    floats = needed_bytes(Contender(name="bfloat16", group_size=128, threads=1), seven, 640, 1)
    assert 13.476e9 < floats < 13.476e9 + 4 * gib
    theirs = needed_bytes(Contender(name="tq2_0", group_size=128, threads=1), seven, 640, 1)
    assert theirs == int(1.5 * gib) + 6_738_149_376 // 256 * 66 + 2 * cached


# --- processes and the command


def test_child_measures_each_case_within_its_time() -> None:
    request = {
        "contender": asdict(
            Contender(name="torch", group_size="row", threads=torch.get_num_threads())
        ),
        "shape": asdict(TINY),
        "cases": [asdict(Case(prompt=prompt, batch=2, new_tokens=3)) for prompt in (4, 10_000_000)],
        "seconds": 1e-3,
        "limit": 5.0,
        "clock": "processor",
        "file": None,
    }
    answer = child.respond(request)
    first, second = answer["cases"]
    assert len(first["token_seconds"]) == 2 * len(first["prompt_seconds"]) == 2
    assert second["left_out"].startswith("its prompts would take about ")
    assert answer["base_bytes"] > 0
    assert answer["weight_bytes"] > TINY.weights_read() / 4


def test_the_read_bandwidth_is_measured_by_either_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "last_level_cache", lambda: Cache(1 << 20, "a test"))
    request = {
        "backends": ["torch"],
        "threads": torch.get_num_threads(),
        "seconds": 0.02,
        "clock": "wall",
    }
    for clock in ("wall", "processor"):
        answer = child.respond({**request, "clock": clock})
        assert 1e7 < answer["bytes_per_second"] < 1e13
        assert answer["how"].endswith("64 MiB")


def test_a_process_that_fails_shows_its_own_message(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    lost = tmp_path / "none.gguf"
    theirs = Contender(name="tq2_0", group_size=128, threads=1)
    with pytest.raises(ArbError, match=r"llama.cpp TQ2_0: its process ended with 1") as caught:
        child.measure_contender(
            theirs,
            TINY,
            [Case(prompt=4, batch=1, new_tokens=2)],
            seconds=0.1,
            limit=1.0,
            clock="wall",
            file=lost,
        )
    assert "llama.cpp cannot load none.gguf" in caught.value.hint


def test_the_command_runs_from_end_to_end(processes: list[str], tmp_path: Path) -> None:
    arguments = [
        "generate",
        "--shapes",
        "tiny",
        "--contenders",
        "torch,tq2_0",
        "--prompts",
        "8",
        "--batches",
        "1,2",
    ]
    more = [
        "--new-tokens",
        "4",
        "--threads",
        "1",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--group",
        "row",
    ]
    done = CliRunner().invoke(bench, [*arguments, *more, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.stderr or done.exception
    assert processes == ["bandwidth", "torch", "tq2_0"]
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["format"], result["version"], result["group_size"]) == (
        "arb-bench-generate",
        1,
        "row",
    )
    assert [(row["contender"], row["batch"]) for row in result["rows"]] == [
        ("torch", 1),
        ("tq2_0", 1),
        ("torch", 2),
        ("tq2_0", 2),
    ]
    assert {len(row) for row in TABLE.rows(result)} == {len(TABLE.columns)}
    assert (tmp_path / "table.md").read_text().startswith("| model |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "70b"), "'70b' is not one of 0.6m, 125m, 1b, 2b, 7b, tiny"),
        (("--prompts", "0"), "'0' is not a whole number of at least 1"),
        (("--batches", ","), "it names nothing"),
        (("--clock", "processor", "--threads", "2"), "--clock processor needs --threads 1"),
        (("--new-tokens", "1"), "1 is not in the range x>=2"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(bench, ["generate", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("name", ["torhc", "torhc/int8-cache", "torhc/float-cache"])
def test_unknown_contender_error_suggests_the_nearest(name: str) -> None:
    error = CliRunner().invoke(bench, ["generate", "--contenders", name]).exception
    assert isinstance(error, ArbError)
    assert "torhc" in error.what
    assert "-cache" not in error.what


@pytest.mark.parametrize(
    ("name", "title", "dtype"),
    [
        ("torch", "torch", torch.bfloat16),
        ("torch/float-cache", "torch, cache of float", torch.float32),
        ("torch/int8-cache", "torch, cache of int8", torch.int8),
    ],
)
def test_a_contender_keeps_keys_and_values_in_the_format_of_its_name(
    name: str, title: str, dtype: torch.dtype
) -> None:
    contender = Contender(name=name, group_size="row", threads=torch.get_num_threads())
    assert (contender.backend, contender.title) == ("torch", title)
    both = GenerateBench(shapes=(TINY,), contenders=("torch", name, "bfloat16", "tq2_0"))
    assert both.backends == ("torch",)
    session = open_session(contender, TINY, 16, None)
    assert isinstance(session, DecoderSession)
    session.start(2, 8)
    session.read(np.zeros((2, 3), dtype=np.int64))
    assert session.cache.layers[0].stored[0].dtype == dtype
    assert session.cache.length == 3


# --- llama.cpp


@pytest.mark.parametrize("kind", ["TQ2_0", "Q2_0", "TQ1_0"])
@pytest.mark.parametrize("shape", [TINY, BITNET], ids=["llama", "bitnet"])
def test_llama_cpp_cached_passes_equal_one_whole_pass(
    shape: GenerationShape, kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    write_random_gguf(file, shape, kind, 64)
    assert 0 < file.stat().st_size - file_bytes(shape, kind) < 20_000
    session = LlamaCpp(file, shape, kind, threads=1)
    block_bytes = {"TQ2_0": 66, "Q2_0": 4 * 18, "TQ1_0": 54}[kind]
    assert session.weight_bytes == shape.weights_read() * block_bytes // 256
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (3, 6))
    session.start(3, 8)
    together = session.read(tokens)
    for row in range(3):
        session.start(1, 8)
        for place in range(6):
            alone = session.read(tokens[row : row + 1, place : place + 1])
        logits = session.logits(0)
        # Keys and values are float16, and flash attention may sum in another order.
        assert logits[together[row]] == pytest.approx(logits[alone[0]], abs=0.02)
        assert float(logits.std()) > 0.01
    session.close_context()


def test_blocks_of_q2_0_hold_trits() -> None:
    interchange = pytest.importorskip("arb_ternary_interchange.gguf.blocks")
    blocks = _random_blocks("Q2_0", 3)
    trits, scales = interchange.decode_codes(blocks, interchange.Q2_0)
    drawn = np.random.default_rng(3).integers(-1, 2, trits.shape)
    np.testing.assert_array_equal(trits, drawn)
    assert scales.shape == (len(blocks), 4)
    assert (scales == 1 / 32).all()


@pytest.mark.parametrize("kind", ["TQ2_0", "TQ1_0"])
def test_a_third_of_the_weights_of_a_file_is_zero(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    write_random_gguf(file, BITNET, kind, 64)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert len(tensors) == 1 + BITNET.layers * (7 + 4) + 1
    down = gguf.dequantize(
        tensors["blk.1.ffn_down.weight"].data, tensors["blk.1.ffn_down.weight"].tensor_type
    )
    assert down.shape == (BITNET.width, BITNET.feed_forward)
    assert set(np.unique(down)) == {-1 / 32, 0.0, 1 / 32}
    assert float((down == 0).mean()) == pytest.approx(1 / 3, abs=0.02)
