"""Ranks that are killed, halted or asked to stop: they are named, and the bytes stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.yaml_document import dump_yaml

Compare = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def config(ranks: Any, text: Path) -> Path:
    shape = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "max_length": 8,
        "group_size": 32,
        "float_parts": ["norms"],
    }
    phase = {
        "name": "standard",
        "steps": 12,
        "batch_size": 2,
        "block_size": 8,
        "eval_every": 5,
        "eval_batches": 3,
        "gradient_accumulation_steps": 3,
    }
    path: Path = ranks.folder / "lost.yaml"
    path.write_text(
        dump_yaml(
            {
                "name": "lost",
                "data": {"name": "text", "path": str(text), "tokenizer": "characters"},
                "model": {"name": "decoder", **shape},
                "optimizer": {
                    "name": "split",
                    "ternary": {"name": "sign_votes", "accum_threshold": 2, "e_accum_threshold": 2},
                    "float": "adamw",
                },
                "threads": 1,
                "deterministic": True,
                "checkpoint": {"every": 3, "keep": 2},
                "phases": [phase],
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def whole(ranks: Any, config: Path) -> Path:
    """Return an undisturbed run of one process."""
    directory: Path = ranks.folder / "whole"
    ranks.must(config, directory)
    return directory


@pytest.fixture(scope="module")
def moments(ranks: Any, config: Path, whole: Path, same_files: Compare) -> list[int]:
    """Return the number of moments of each of two ranks in an undisturbed run."""
    directory = ranks.folder / "undisturbed"
    ended = ranks.must(config, directory, size=2)
    same_files(whole, directory)
    found: list[int] = ended.moments
    return found


def killed_and_restarted(
    ranks: Any, config: Path, whole: Path, same_files: Compare, directory: Path, at: tuple[int, int]
) -> None:
    ended = ranks.run(config, directory, size=2, kill=at)
    rank = at[0]
    other = 1 - at[0]
    assert ended.codes[rank] == -9
    # The other rank ends by itself with a message, or finishes if no collective was left.
    assert ended.codes[other] in (0, 1)
    if ended.codes[other]:
        assert "has ended" in ended.said[other]
    ranks.must(config, directory, size=2, attempt=1)
    # An attempt that is killed before its first checkpoint leaves its metrics.
    (directory / "metrics.before.jsonl").unlink(missing_ok=True)
    same_files(whole, directory)


def test_a_killed_rank_is_restarted_with_the_same_bytes(
    ranks: Any, config: Path, whole: Path, moments: list[int], same_files: Compare
) -> None:
    # In the middle of a run, a rank that does not write.
    directory = ranks.folder / "killed"
    killed_and_restarted(ranks, config, whole, same_files, directory, (1, moments[1] // 2))


@pytest.mark.slow
def test_ranks_killed_at_random_moments(
    ranks: Any, config: Path, whole: Path, moments: list[int], same_files: Compare
) -> None:
    generator = random.Random(18)
    for number in range(20):
        rank = generator.randrange(2)
        at = (rank, generator.randrange(1, moments[rank] + 1))
        killed_and_restarted(
            ranks, config, whole, same_files, ranks.folder / f"killed {number}", at
        )


@pytest.mark.slow
def test_a_halted_rank_is_named(ranks: Any, config: Path, moments: list[int]) -> None:
    halted(ranks, config, "halted", (1, moments[1] // 2), size=2)


@pytest.mark.slow
def test_a_halted_rank_0_is_named(ranks: Any, config: Path, moments: list[int]) -> None:
    halted(ranks, config, "halted 0", (0, moments[0] // 2), size=3)


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_and_names_it(
    ranks: Any, config: Path, moments: list[int]
) -> None:
    ended = ranks.run(config, ranks.folder / "failed", size=2, fail=(1, moments[1] // 2))
    assert ended.codes == [1, 1]
    assert "ValueError: bad luck" in ended.said[1]
    assert (
        f"rank 0: rank 1 (host {_host()}, pid {ended.pids[1]}) has ended: ValueError: bad luck"
        in ended.said[0]
    )


@pytest.mark.extended
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_ranks_save_and_stop_if_one_is_asked_to(
    ranks: Any, config: Path, whole: Path, moments: list[int], same_files: Compare, rank: int
) -> None:
    directory = ranks.folder / f"asked {rank}"
    ended = ranks.run(config, directory, size=2, ask=(rank, moments[rank] // 2))
    assert ended.codes == [130, 130]
    assert all("stopped by SIGTERM after step" in said for said in ended.said)
    assert list((directory / "checkpoints").glob("step-*"))
    ranks.must(config, directory, size=2, resume="auto")
    same_files(whole, directory)


SHARDED = ("ranks={weights: sharded, optimizer_state: sharded}",)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [(), SHARDED], ids=["replicated", "sharded"])
def test_a_run_continues_on_other_numbers_of_ranks(
    ranks: Any, config: Path, same_files: Compare, shared: tuple[str, ...]
) -> None:
    # Only the last checkpoint is kept, wherever the run was stopped before.
    options = ("phases.0.gradient_accumulation_steps=4", "checkpoint.keep=1", *shared)
    whole, moved = (ranks.folder / f"{name} {len(options)}" for name in ("whole of", "moved"))
    ranks.must(config, whole, *options)
    for share, size in ((3, 2), (2, 4)):
        seen = ranks.must(
            config, ranks.folder / f"{len(options)} undisturbed on {size}", *options, size=size
        ).moments
        resume = "auto" if moved.exists() else None
        stopped = ranks.run(
            config, moved, *options, size=size, resume=resume, ask=(1, seen[1] // share)
        )
        assert set(stopped.codes) == {130}, "\n".join(stopped.said)
    ranks.must(config, moved, *options, resume="auto")
    same_files(whole, moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "shared"), [(3, ()), (4, ()), (3, SHARDED)], ids=["3", "4", "3-sharded"]
)
def test_more_ranks_write_the_same_bytes(
    ranks: Any, config: Path, same_files: Compare, size: int, shared: tuple[str, ...]
) -> None:
    options = ("phases.0.gradient_accumulation_steps=5", *shared)
    one, more = (ranks.folder / f"{name} {size} {len(options)}" for name in ("one for", "ranks"))
    ranks.must(config, one, *options)
    ranks.must(config, more, *options, size=size)
    same_files(one, more)


@pytest.mark.slow
def test_ranks_with_sharded_sums_are_killed_in_backward(
    ranks: Any, config: Path, same_files: Compare
) -> None:
    whole = ranks.folder / "whole of sharded"
    seen = ranks.folder / "sharded undisturbed"
    ranks.must(config, whole, *SHARDED)
    moments = ranks.must(config, seen, *SHARDED, size=2).moments
    same_files(whole, seen)
    # Near the middle of a run are all kinds of collectives of a step: votes, sums, flips.
    for number, share in enumerate((0.45, 0.5, 0.52, 0.55)):
        rank = number % 2
        directory = ranks.folder / f"sharded killed {number}"
        ended = ranks.run(
            config, directory, *SHARDED, size=2, kill=(rank, int(moments[rank] * share))
        )
        assert (ended.codes[rank], ended.codes[1 - rank]) == (-9, 1)
        assert "has ended" in ended.said[1 - rank]
        ranks.must(config, directory, *SHARDED, size=2, attempt=1)
        same_files(whole, directory)
    halted(ranks, config, "sharded halted", (1, moments[1] // 2), *SHARDED, size=2)


def halted(
    ranks: Any, config: Path, name: str, at: tuple[int, int], *overrides: str, size: int
) -> None:
    """Halt a rank at a moment, and check that every other rank names it within the limit."""
    environment = {"ARB_TERNARY_RANK_TIMEOUT": "2"}
    ended = ranks.run(
        config, ranks.folder / name, *overrides, size=size, halt=at, environment=environment
    )
    rank = at[0]
    assert ended.codes == [-9 if other == rank else 1 for other in range(size)]
    for other in range(size):
        if other != rank:
            assert (
                f"rank {rank} (host {_host()}, pid {ended.pids[rank]}): no sign of life for 2 s"
                in ended.said[other]
            )


def _host() -> str:
    import socket

    return socket.gethostname()
