"""The stages of an upcycled run: float models in ``RUN/stages/NAME``, each made from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from arb_ternary.errors import DataError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.model_state import run_of
from arb_ternary_upcycle.float_model import FloatModel, is_float_model

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

StageName = Literal["teacher", "prepared", "surgery"]

#: The phase that makes each stage, in the order in which one is made from another.
MADE_BY: Final[Mapping[StageName, str]] = {
    "teacher": "load_teacher",
    "prepared": "fold_rotate",
    "surgery": "surgery",
}


def stage_folder(context: TrainingContext, name: StageName) -> Path:
    """Return the folder of a stage of a run."""
    return context.directory / "stages" / name


def find_stage(
    context: TrainingContext, option: Path | str | None, names: Sequence[StageName]
) -> FloatModel:
    """Find the newest complete stage among ``names``, by the order of :data:`MADE_BY`.

    Args:
        context: the run.
        option: a stage folder, which is taken whatever its name, or a run directory; None = this
            run. If a run has no stage, those of the run that it started from (``--init-from``)
            count.
        names: stages that serve.

    Raises:
        DataError: there is none; the message names the phase that makes it.
    """
    start = context.directory if option is None else Path(option)
    if option is not None and is_float_model(start):
        return FloatModel(start)
    serving = [name for name in MADE_BY if name in names]
    for directory in lineage(start):
        for name in reversed(serving):
            folder = directory / "stages" / name
            if is_float_model(folder):
                return FloatModel(folder)
    makers = " or ".join(f"`{MADE_BY[name]}`" for name in serving)
    raise DataError(
        f"{start}: no complete stage {' or '.join(serving)} is here, nor in the run that it "
        "started from",
        f"Put the phase {makers} before this one, or name a stage folder, or a run that has one.",
    )


def lineage(directory: Path) -> Iterator[Path]:
    """Yield a run, the run that it started from, and so on."""
    seen: set[Path] = set()
    found: Path | None = directory
    while found is not None and found.resolve() not in seen:
        seen.add(found.resolve())
        yield found
        run = RunDirectory(found)
        source = run.record().get("init_from") if run.exists() else None
        earlier = None if source is None else run_of(Path(source))
        found = None if earlier is None else earlier.path
