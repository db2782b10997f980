"""The suite of a trainer phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import attrs
import pytest
import torch

from arb_ternary.errors import Interrupted
from arb_ternary.protocols.runs import Phase
from arb_ternary_testing.component import ComponentCase, make_choice
from arb_ternary_testing.interruption import Crash, interruption
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

_TEXT = "".join(
    f"line {number}: the quick brown fox jumps over {number * number % 97} lazy dogs\n"
    for number in range(60)
)
_LEARNED = ("weight", "exponent", "bias")


class PhaseSuite(ComponentCase):
    """Everything that a :class:`~arb_ternary.protocols.runs.Phase` has to do, tried in whole runs
    of a tiny model.

    Subclass it, set ``component`` to the registered name, and let ``options`` make the phase take
    about ``steps`` optimizer steps of very small batches. A phase that needs another model,
    optimizer or masking says so in ``run``.

    Attributes:
        steps: optimizer steps that the phase takes with ``options``.
        run: what the run's config says differently: components by kind, as in a config file.
    """

    kind: ClassVar[str] = "phase"
    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"steps": 6, "batch_size": 2, "block_size": 8}
    )
    steps: ClassVar[int] = 6
    run: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def make_config(
        self, folder: Path, *, every: int = 1, until: tuple[int, str] | None = None
    ) -> RunConfig:
        """The run: a small pure decoder on a few lines of text.

        Args:
            folder: where the text is written.
            every: steps between checkpoints.
            until: step after which the run is interrupted, and how.
        """
        text = folder / "text.txt"
        text.write_text(_TEXT, encoding="utf-8")
        defaults: dict[str, Any] = {
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
        }
        parts = {
            kind: make_choice(
                kind, choice["name"], {key: value for key, value in choice.items() if key != "name"}
            )
            for kind, choice in {**defaults, **self.run}.items()
        }
        config = RunConfig(
            name="conformance",
            seed=3,
            phases=(make_choice("phase", self.component, self.options),),
            checkpoint=CheckpointConfig(every=every, keep=100),
            **parts,
        )
        if until is None:
            return config
        how: Literal["stop", "crash"] = "crash" if until[1] == "crash" else "stop"
        return attrs.evolve(config, trackers=(interruption(until[0], how),))

    def train(self, config: RunConfig, directory: Path, *, resume: bool = False) -> RunReport:
        """Run ``config`` in ``directory`` on the reference backend, without a word on the
        screen.
        """
        request = RunRequest(
            directory=directory, resume="auto" if resume else None, backend="torch", reporter=Silent
        )
        return train(config, request)

    def _end(self, directory: Path) -> tuple[Checkpoint, bytes]:
        """The newest checkpoint and the metrics file."""
        run = RunDirectory(directory)
        checkpoint = CheckpointStore(run.checkpoints).newest_good()[0]
        assert checkpoint is not None, "the phase has saved no checkpoint"
        return checkpoint, run.metrics_file.read_bytes()

    @pytest.fixture
    def uninterrupted(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[RunReport, Checkpoint, bytes]:
        """A run from start to end; made once a class."""
        cls = type(self)
        if "_uninterrupted" not in cls.__dict__:
            folder = tmp_path_factory.mktemp("uninterrupted")
            report = self.train(self.make_config(folder), folder / "run")
            cls._uninterrupted = (report, *self._end(folder / "run"))  # type: ignore[attr-defined]
        made: tuple[RunReport, Checkpoint, bytes] = cls._uninterrupted  # type: ignore[attr-defined]
        return made

    def test_it_keeps_the_protocol_of_a_phase(self) -> None:
        phase = self.build()
        assert isinstance(phase, Phase)
        assert phase.name

    def test_it_takes_its_steps_and_counts_them(
        self, uninterrupted: tuple[RunReport, Checkpoint, bytes]
    ) -> None:
        report, checkpoint, metrics = uninterrupted
        assert report.steps == checkpoint.step == self.steps
        assert [phase["steps"] for phase in report.phases] == [self.steps]
        assert metrics.count(b'"event": "train"') == self.steps

    def test_the_model_learns(
        self, uninterrupted: tuple[RunReport, Checkpoint, bytes], tmp_path: Path
    ) -> None:
        _, last, _ = uninterrupted
        with pytest.raises(Interrupted):
            self.train(self.make_config(tmp_path, until=(1, "stop")), tmp_path / "run")
        first, _ = self._end(tmp_path / "run")
        learned = [name for name in first.model if name.rpartition(".")[2] in _LEARNED]
        assert any(
            name not in last.model or not torch.equal(first.model[name], last.model[name])
            for name in learned
        ), "no weight changed between the first step and the last"

    def test_two_runs_end_with_the_same_bits(
        self, uninterrupted: tuple[RunReport, Checkpoint, bytes], tmp_path: Path
    ) -> None:
        self.train(self.make_config(tmp_path), tmp_path / "run")
        _assert_same_end(self._end(tmp_path / "run"), uninterrupted[1:])

    def test_stopped_after_any_step_it_saves_and_resumes_to_the_same_bits(
        self, uninterrupted: tuple[RunReport, Checkpoint, bytes], tmp_path: Path
    ) -> None:
        """One run, stopped after every step."""
        run = tmp_path / "run"
        for step in range(1, self.steps):
            with pytest.raises(Interrupted):
                # No checkpoint is due: the one that the run continues from is the one that stopping
                # wrote.
                self.train(
                    self.make_config(tmp_path, every=0, until=(step, "stop")), run, resume=step > 1
                )
            assert self._end(run)[0].step == step, f"asked to stop after step {step}"
        self.train(self.make_config(tmp_path), run, resume=True)
        _assert_same_end(self._end(run), uninterrupted[1:])

    def test_killed_run_resumes_to_the_same_bits(
        self, uninterrupted: tuple[RunReport, Checkpoint, bytes], tmp_path: Path
    ) -> None:
        """One run, killed after every step; it takes some of them again, since it saves every
        second one.
        """
        run = tmp_path / "run"
        for step in range(1, self.steps + 1):
            with pytest.raises(Crash):
                self.train(
                    self.make_config(tmp_path, every=2, until=(step, "crash")), run, resume=step > 1
                )
        self.train(self.make_config(tmp_path, every=2), run, resume=True)
        _assert_same_end(self._end(run), uninterrupted[1:])


def _assert_same_end(got: tuple[Checkpoint, bytes], wanted: tuple[Checkpoint, bytes]) -> None:
    assert got[0].step == wanted[0].step
    assert list(got[0].model) == list(wanted[0].model)
    different = [
        name
        for name, value in got[0].model.items()
        if not torch.equal(value, wanted[0].model[name])
    ]
    assert not different, f"different: {different}"
    assert got[1] == wanted[1], "the metrics differ"
