"""Runs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import wandb

from arb_ternary.errors import UsageProblem
from arb_ternary_track.config import WandbConfig
from arb_ternary_track.points import Point, TrackedRun
from arb_ternary_track.variables import WANDB_MODE
from arb_ternary_track.writer import Writer

Mode = Literal["online", "offline", "disabled", "shared"]
#: The values of ``WANDB_MODE``. The last two are wandb's older names.
_MODES: Final[dict[str, Mode]] = {
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
    "shared": "shared",
    "run": "online",
    "dryrun": "offline",
}


class WandbWriter(Writer):
    """Logs to a run of wandb.

    Rows have the step of the run as ``step``, because wandb's own counts rows.
    """

    def __init__(self, config: WandbConfig) -> None:
        owner = "" if config.entity is None else f"{config.entity}/"
        self.key = f"wandb {owner}{config.project}"
        self._config = config
        self._run: Any = None

    def open(self, run: TrackedRun) -> None:
        config = self._config
        mode = choose_mode()
        offline = mode == "offline"
        folder = run.directory / config.folder
        # wandb would write to a temporary folder instead.
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.run_name or run.name,
            id=run.id,
            dir=str(folder),
            mode=mode,
            config=dict(run.config),
            resume=None if offline else "allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=offline, finish_timeout=max(config.wait, 0.1)
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            row: dict[str, Any] = dict(point.scalars)
            for name, histogram in point.histograms.items():
                bins = (histogram.counts, histogram.edges)
                row[name] = wandb.Histogram(np_histogram=bins)
            if row:
                self._run.log({**row, "step": point.step, "_timestamp": point.time})
            if point.report is not None:
                self._run.summary.update({"report": dict(point.report)})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def choose_mode() -> Mode:
    """Return the mode that the user has set; otherwise online if there is a key, or offline.

    Raises:
        UsageProblem: ``WANDB_MODE`` is set to a value that wandb does not have.
    """
    wanted = WANDB_MODE.read()
    if not wanted:
        # This asks nobody and sends nothing.
        has_key = wandb.login(prompt=False, verify=False)
        return "online" if has_key else "offline"
    if wanted not in _MODES:
        raise UsageProblem(
            f"WANDB_MODE: wandb has no mode {wanted!r}", f"use one of {', '.join(_MODES)}"
        )
    return _MODES[wanted]
