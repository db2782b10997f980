"""The suite of a trainer phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import attrs
import pytest
import torch

from arb_ternary.errors import Interrupted
from arb_ternary.protocols.runs import Phase
from arb_ternary_testing.component import ComponentCase, make_section
from arb_ternary_testing.interruption import Crash, How, interruption
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

_TEXT: Final = "".join(
    f"line {number}: the quick brown fox jumps over {number * number % 97} lazy dogs\n"
    for number in range(60)
)
_LEARNED: Final = ("weight", "exponent", "bias")


class _End(NamedTuple):
    """Results of a run: its newest checkpoint and its metrics file."""

    checkpoint: Checkpoint
    metrics: bytes


_Uninterrupted = tuple[RunReport, _End]


class PhaseSuite(ComponentCase):
    """Tests that every :class:`~arb_ternary.protocols.runs.Phase` must pass.

    They run a tiny model.

    Subclass it, set ``component`` to the registered name, and choose ``options`` with which the
    phase takes ``steps`` optimizer steps of very small batches. If the phase needs another model,
    optimizer or masking, set ``run``.

    Attributes:
        steps: optimizer steps that the phase takes with ``options``.
        run: sections that the run's config has instead of the default ones, by kind, as in a
            config file.
    """

    kind: ClassVar[str] = "phase"
    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"steps": 6, "batch_size": 2, "block_size": 8}
    )
    steps: ClassVar[int] = 6
    run: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def make_config(
        self,
        folder: Path,
        *,
        every: int = 1,
        until: tuple[int, How] | None = None,
    ) -> RunConfig:
        """Return the config of the run: a small pure decoder on a few lines of text.

        Args:
            folder: folder that the text is written to.
            every: steps between checkpoints.
            until: step after which the run is interrupted, and how.
        """
        text = folder / "text.txt"
        text.write_text(_TEXT, encoding="utf-8")
        sections: dict[str, Any] = {
            "data": {"name": "text", "path": str(text)},
            "model": {
                "name": "decoder",
                "width": 32,
                "layers": 1,
                "heads": 2,
                "max_length": 32,
                "group_size": 32,
            },
            "optimizer": {"name": "sign_votes", "accum_threshold": 2, "e_accum_threshold": 4},
            "masking": {"name": "causal"},
            **self.run,
        }
        parts = {kind: make_section(kind, section) for kind, section in sections.items()}
        phase = make_section("phase", {"name": self.component, **self.options})
        config = RunConfig(
            name="conformance",
            seed=3,
            phases=(phase,),
            checkpoint=CheckpointConfig(every=every, keep=100),
            **parts,
        )
        if until is None:
            return config
        return attrs.evolve(config, trackers=(interruption(*until),))

    def train(self, config: RunConfig, directory: Path, *, resume: bool = False) -> RunReport:
        """Run ``config`` in ``directory`` on the reference backend, without terminal output."""
        request = RunRequest(
            directory=directory,
            resume="auto" if resume else None,
            backend="torch",
            reporter=Silent,
        )
        return train(config, request)

    def _end(self, directory: Path) -> _End:
        """Return the newest checkpoint and the metrics of a run."""
        run = RunDirectory(directory)
        checkpoint = CheckpointStore(run.checkpoints).newest_good()[0]
        assert checkpoint is not None, "the phase has saved no checkpoint"
        return _End(checkpoint, run.metrics_file.read_bytes())

    @pytest.fixture
    def uninterrupted(self, tmp_path_factory: pytest.TempPathFactory) -> _Uninterrupted:
        """Return the report and the end of a run from start to end; made once per class."""
        cls = type(self)
        if "_uninterrupted" not in cls.__dict__:
            folder = tmp_path_factory.mktemp("uninterrupted")
            report = self.train(self.make_config(folder), folder / "run")
            cls._uninterrupted = (report, self._end(folder / "run"))  # type: ignore[attr-defined]
        made: _Uninterrupted = cls._uninterrupted  # type: ignore[attr-defined]
        return made

    def test_implements_the_phase_protocol(self) -> None:
        phase = self.build()
        assert isinstance(phase, Phase)
        assert phase.name

    def test_takes_its_steps_and_counts_them(self, uninterrupted: _Uninterrupted) -> None:
        report, end = uninterrupted
        assert report.steps == end.checkpoint.step == self.steps
        assert [phase["steps"] for phase in report.phases] == [self.steps]
        assert end.metrics.count(b'"event": "train"') == self.steps

    def test_the_model_learns(self, uninterrupted: _Uninterrupted, tmp_path: Path) -> None:
        last = uninterrupted[1].checkpoint.model
        with pytest.raises(Interrupted):
            self.train(self.make_config(tmp_path, until=(1, "stop")), tmp_path / "run")
        first = self._end(tmp_path / "run").checkpoint.model
        learned = [name for name in first if name.rpartition(".")[2] in _LEARNED]
        assert any(
            name not in last or not torch.equal(first[name], last[name]) for name in learned
        ), "no weight changed between the first step and the last"

    def test_two_runs_end_with_the_same_bits(
        self,
        uninterrupted: _Uninterrupted,
        tmp_path: Path,
    ) -> None:
        self.train(self.make_config(tmp_path), tmp_path / "run")
        _assert_same_end(self._end(tmp_path / "run"), uninterrupted[1])

    def test_run_stopped_after_any_step_resumes_bitwise(
        self,
        uninterrupted: _Uninterrupted,
        tmp_path: Path,
    ) -> None:
        """Stop one run after every step."""
        run = tmp_path / "run"
        for step in range(1, self.steps):
            # No checkpoint is due: the run continues from the one that stopping wrote.
            config = self.make_config(tmp_path, every=0, until=(step, "stop"))
            with pytest.raises(Interrupted):
                self.train(config, run, resume=step > 1)
            assert self._end(run).checkpoint.step == step, f"asked to stop after step {step}"
        self.train(self.make_config(tmp_path), run, resume=True)
        _assert_same_end(self._end(run), uninterrupted[1])

    def test_killed_run_resumes_to_the_same_bits(
        self,
        uninterrupted: _Uninterrupted,
        tmp_path: Path,
    ) -> None:
        """Kill one run after every step. It saves every second step, so it repeats some."""
        run = tmp_path / "run"
        for step in range(1, self.steps + 1):
            config = self.make_config(tmp_path, every=2, until=(step, "crash"))
            with pytest.raises(Crash):
                self.train(config, run, resume=step > 1)
        self.train(self.make_config(tmp_path, every=2), run, resume=True)
        _assert_same_end(self._end(run), uninterrupted[1])


def _assert_same_end(got: _End, wanted: _End) -> None:
    assert got.checkpoint.step == wanted.checkpoint.step
    assert list(got.checkpoint.model) == list(wanted.checkpoint.model)
    different = []
    for name, value in got.checkpoint.model.items():
        if not torch.equal(value, wanted.checkpoint.model[name]):
            different.append(name)
    assert not different, f"different: {different}"
    assert got.metrics == wanted.metrics, "the metrics differ"
