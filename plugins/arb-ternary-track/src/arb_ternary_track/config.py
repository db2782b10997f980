"""The options of the trackers."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, frozen

from arb_ternary.config.options import non_negative, option, optional, positive


def is_project(instance: Any, attribute: Attribute[str], value: str) -> None:
    """Check the name of a project, which becomes part of a path and of an address."""
    if not value.strip():
        raise ValueError("must not be empty")
    if set(value) & set("/\\#?%:"):
        raise ValueError("must not contain any of / \\ # ? % :")


@frozen(kw_only=True)
class TrackerConfig:
    """Options of every tracker."""

    layers_every: int = option(
        100,
        "steps between two measurements of the layers: flips, saturation, and histograms of "
        "accumulators and exponents; 0 = none",
        validator=non_negative,
    )
    queue: int = option(
        1000, "most points that wait to be written; further ones are dropped", validator=positive
    )
    wait: int = option(
        10,
        "most seconds that the end of the run waits for the rest",
        validator=non_negative,
        largest=86_400,
    )


@frozen(kw_only=True)
class TensorboardConfig(TrackerConfig):
    """Options of the tracker ``tensorboard``."""

    folder: str = option(
        "trackers/tensorboard", "folder of the event files; relative to the run directory"
    )


@frozen(kw_only=True)
class ProjectConfig(TrackerConfig):
    """Options of trackers that keep runs in projects."""

    project: str = option("arb-ternary", "project of the run", validator=is_project)
    run_name: str | None = option(None, "name of the run there; null = that of the run directory")


@frozen(kw_only=True)
class WandbConfig(ProjectConfig):
    """Options of the tracker ``wandb``."""

    entity: str | None = option(
        None, "user or team that has the project; null = your own", validator=optional(is_project)
    )
    folder: str = option("trackers", "folder of wandb's files; relative to the run directory")


@frozen(kw_only=True)
class TrackioConfig(ProjectConfig):
    """Options of the tracker ``trackio``."""
