"""The study of networks: bytes and seconds against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arb_ternary.errors import ConfigError
from arb_ternary_bench.network.config import (
    SCHEMES,
    ClusterConfig,
    DecoderSizes,
    MatrixSizes,
    ModelSizes,
    NetworkConfig,
    VotesConfig,
)
from arb_ternary_bench.network.model import decoder_matrices, model_of
from arb_ternary_bench.network.schemes import SUMMARIES, bits_in_bytes, bits_in_words
from arb_ternary_bench.studies import network
from arb_ternary_bench.study import Session, main

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "network-7b.yaml"
#: A million weights on two machines of two GPUs. 1 GB/s per GPU inside; 1 GB/s per machine, so
#: half of it per GPU, between.
MILLION = ModelSizes(matrices=(MatrixSizes(rows=1000, columns=500, count=2),))
TWO_BY_TWO = ClusterConfig(name="2 x 2", nodes=2, gpus=2, inside=1.0, between=1.0)


def row(
    scheme: Any, *, model: ModelSizes = MILLION, cluster: ClusterConfig = TWO_BY_TWO, **votes: Any
) -> Any:
    config = NetworkConfig(
        model=model, clusters=(cluster,), votes=VotesConfig(**votes), schemes=(scheme,)
    )
    (found,) = network.run(config, Session(Path()))["rows"]
    return found


def test_fsdp2_passes_three_of_four_parts_three_times() -> None:
    found = row("fsdp2")
    # 2 bytes x 1e6 x 3/4 = 1.5 MB three times; of two hops out of a machine's GPUs in a ring, one
    # leaves it.
    assert (found["inside_bytes"], found["between_bytes"]) == (3 * 0.75e6, 3 * 0.75e6)
    # 0.75 MB at 1 GB/s inside, at 0.5 GB/s between; both at once.
    assert found["seconds_inside"] == pytest.approx(3 * 0.75e-3)
    assert found["seconds_between"] == pytest.approx(3 * 1.5e-3)
    assert found["seconds"] == found["seconds_between"]
    assert found["bits_per_weight"] == pytest.approx(3 * 16 * 3 / 4)
    assert found["state_bytes"] == 4e6


def test_ddp_passes_a_gradient_twice() -> None:
    found = row("ddp")
    assert found["inside_bytes"] + found["between_bytes"] == 2 * 2e6 * 3 / 4


def test_hsdp_sends_only_a_shard_of_the_gradient() -> None:
    found = row("hsdp")
    # Inside: 2 MB x 1/2, three times. Between: the shard of 1 MB, all-reduced by two machines:
    # twice the half of it.
    assert (found["inside_bytes"], found["between_bytes"]) == (3e6, 1e6)
    # One after the other.
    assert found["seconds"] == pytest.approx(3e-3 + 2e-3)


def test_votes_travel_in_base_three_and_flips_come_back() -> None:
    votes, flips, *_ = row("votes", levels=3, flip_share=0.01)["transfers"]
    # 1.6 bits: 200 kB, a quarter to each; one other GPU is in the machine, two are not.
    assert (votes["inside_bytes"], votes["between_bytes"]) == (50e3, 100e3)
    assert votes["seconds"] == pytest.approx(max(50e3 / 1e9, 100e3 / 0.5e9))
    # 31 blocks of 32,768 weights and 10,000 flips, two bytes each; three of four parts are passed
    # on.
    assert flips["inside_bytes"] + flips["between_bytes"] == pytest.approx(2 * 10031 * 3 / 4)


def test_row_and_column_floats_travel_once_per_round_each_way() -> None:
    cluster = ClusterConfig(name="", nodes=1, gpus=4, micro_batches=12)
    _, _, there, back = row("votes", cluster=cluster)["transfers"]
    # Statistics and magnitudes of 2 x (1000 + 500) edges, a sum of each of 2 matrices, in float32.
    floats = 4 * (2 * 3000 + 2)
    assert there["inside_bytes"] == pytest.approx(3 * floats * 3 / 4)
    assert back["inside_bytes"] == pytest.approx(floats * 3 / 4)


def test_float_parts_with_votes_are_summed_in_order() -> None:
    some = ModelSizes(matrices=MILLION.matrices, float_parameters=1000)
    difference = row("votes", model=some)["inside_bytes"] - row("votes")["inside_bytes"]
    # To owners: one of four parts is inside; back: half of the three that are passed on.
    assert difference == pytest.approx(4000 * (1 / 4 + 3 / 8))


def test_learned_exponents_send_one_byte_each_way() -> None:
    for batches, there in ((4, 1), (8, 2)):
        cluster = ClusterConfig(name="", nodes=1, gpus=4, micro_batches=batches)
        *_, votes, settled = row("votes", cluster=cluster, scale_rule="residual", group_size=128)[
            "transfers"
        ]
        # 2000 rows of 4 groups, the last of 116 weights.
        assert (votes["inside_bytes"], settled["inside_bytes"]) == (
            there * 8000 * 3 / 4,
            8000 * 3 / 4,
        )


def test_sums_of_a_machine_leave_it_once_for_all_its_gpus() -> None:
    inside, between, *_ = row("votes_node_sums", levels=3)["transfers"]
    # 200 kB of votes, half of them to the other GPU; then sums of two, base 5, three to a byte, of
    # half the weights.
    assert (inside["inside_bytes"], inside["between_bytes"]) == (100e3, 0)
    assert between["inside_bytes"] == 0
    assert between["between_bytes"] == pytest.approx(1e6 / 3 / 2 / 2)


def test_sharded_trits_are_gathered_twice_per_micro_batch() -> None:
    found = row("trit_gathers", cluster=ClusterConfig(name="", nodes=1, gpus=2, micro_batches=6))
    assert found["transfers"][0]["inside_bytes"] == 2 * 3 * 250e3 / 2


def test_votes_of_sharded_weights_leave_in_every_round() -> None:
    cluster = ClusterConfig(name="", nodes=1, gpus=2, micro_batches=6)
    _, votes = row("trit_gathers", cluster=cluster)["transfers"]
    # Half of a million weights; 8 / 5 bits three times instead of 4 bits once for sums up to 3.
    assert votes["inside_bytes"] == pytest.approx(0.5e6 * (3 * 8 / 5 - 4) / 8)
    _, votes = row("trit_gathers", cluster=cluster, scale_rule="residual", group_size=128)[
        "transfers"
    ]
    # And of 8000 exponents; one byte three times instead of two bytes once.
    assert votes["inside_bytes"] == pytest.approx(0.5e6 * (3 * 8 / 5 - 4) / 8 + 4000)
    assert len(row("trit_gathers")["transfers"]) == 1


def test_powersgd_sends_two_factors_of_a_matrix_both_ways() -> None:
    found = row("powersgd")
    # Rank 4: 4 x 1500 numbers of 4 bytes for each of two matrices.
    assert found["inside_bytes"] + found["between_bytes"] == 2 * 48e3 * 3 / 4


def test_one_bit_adam_sends_a_fifth_of_an_all_reduce() -> None:
    one = row("one_bit_adam")
    ddp = row("ddp")
    ratio = (ddp["inside_bytes"] + ddp["between_bytes"]) / (
        one["inside_bytes"] + one["between_bytes"]
    )
    assert ratio == pytest.approx(1 / (0.15 + 0.85 / 16))


def test_a_vote_takes_the_digits_that_its_sum_needs() -> None:
    assert [bits_in_bytes(limit) for limit in (1, 2, 7, 8, 127, 128, 32767)] == [
        8 / 5,
        8 / 3,
        4,
        8,
        8,
        16,
        16,
    ]
    # 15 digits of base 17 in 64 bits: 17**15 < 2**64 < 17**16.
    assert bits_in_words(8) == 64 / 15
    with pytest.raises(ValueError, match="int16"):
        bits_in_bytes(32768)


@pytest.mark.parametrize(
    ("micro_batches", "largest"),
    [(1, 17), (3, 6), (15, 2), (16, 2), (17, 1), (1024, 1)],
    # clip * cell * rate = 2.5 * 64 * 0.1 = 16, and 16 / n with noise below 1 is rounded down, or up
    # where it is whole
)
def test_largest_vote_in_quanta(micro_batches: int, largest: int) -> None:
    assert VotesConfig(levels=None).largest(micro_batches) == largest
    assert VotesConfig(levels=3).largest(micro_batches) == 1


def test_latency_is_that_of_messages_that_wait_for_one_another() -> None:
    slow = ClusterConfig(name="", nodes=2, gpus=2, inside=1.0, between=1.0, latency=1000.0)
    ring = row("ddp", cluster=slow)["seconds"] - row("ddp")["seconds"]
    assert ring == pytest.approx(6e-3)  # three hops to sum, three to share the sum
    assert row("votes", cluster=slow)["transfers"][0]["seconds"] == pytest.approx(0.2e-3 + 1e-3)


def test_one_gpu_sends_nothing() -> None:
    alone = ClusterConfig(name="", nodes=1, gpus=1)
    for scheme in SCHEMES:
        assert row(scheme, cluster=alone)["bits_per_weight"] == 0


def test_state_of_votes_per_rank_and_per_owner() -> None:
    # 2 bits; 8 bits on a quarter; 16 bits; an int8 exponent per row; an int16 per row and column.
    assert row("votes")["state_bytes"] == 250e3 + 250e3 + 2e6 + 2000 + 2 * 3000
    # With sharded weights a quarter of all three.
    assert row("trit_gathers")["state_bytes"] == 62.5e3 + 250e3 + 500e3 + 2000 + 2 * 3000


def test_a_decoder_has_the_weights_of_its_matrices() -> None:
    small = DecoderSizes(width=8, layers=1, heads=2, kv_heads=1, feed_forward=12, vocabulary=10)
    weights = 2 * 64 + 2 * 32 + 3 * 96 + 2 * 80
    assert sum(m.rows * m.columns * m.count for m in decoder_matrices(small)) == weights
    assert model_of(ModelSizes(decoder=small)).weights == weights


def test_every_scheme_says_what_it_is() -> None:
    assert tuple(SUMMARIES) == SCHEMES


def test_the_example_gives_the_figures_of_the_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["network", str(EXAMPLE), "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    found = {(one["cluster"].split()[-1], one["scheme"]): one for one in result["rows"]}
    # 2 bytes x 7.0e9, three times, 7 of 8 parts, 450 GB/s; on 1024 GPUs an eighth of it at 50 GB/s.
    assert found["NVLink", "fsdp2"]["seconds"] == pytest.approx(0.082, abs=0.0005)
    assert found["InfiniBand", "fsdp2"]["seconds_between"] == pytest.approx(0.105, abs=0.0005)
    assert found["InfiniBand", "hsdp"]["between_bytes"] == pytest.approx(3.5e9, rel=0.01)
    assert found["NVLink", "votes"]["seconds"] == pytest.approx(0.0029, abs=0.00005)
    for scheme, seconds in (("fsdp2", 3.4), ("votes_node_sums", 0.32)):
        assert found["Ethernet", scheme]["seconds_between"] == pytest.approx(seconds, rel=0.02)
    assert "| 8 GPUs with NVLink | fsdp2 | 36.7 | 0 |" in (tmp_path / "table.md").read_text()


def test_the_table_names_schemes_and_machines(tmp_path: Path) -> None:
    command = ["network", str(EXAMPLE), "-o", "schemes=[ddp, votes]", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["machines", "scheme"]
    assert [line.split()[4] for line in lines[1:3]] == ["ddp", "votes"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clusters.0.micro_batches=7", "7 are fewer than the 8 GPUs"),
        ("schemes=[fsdp]", "did you mean 'fsdp2'"),
        ("model.matrices=[]", "none is given"),
        ("clusters=[]", "the table would be empty"),
        ("clusters.1.name=8 GPUs with NVLink", "two are called '8 GPUs with NVLink'"),
    ],
)
def test_impossible_config_is_an_error_with_its_line(override: str, message: str) -> None:
    done = CliRunner().invoke(main, ["network", str(EXAMPLE), "-o", override])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
