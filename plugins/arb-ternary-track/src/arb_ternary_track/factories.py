"""Build the trackers; say what to install if a library is absent."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_track.config import (
    TensorboardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)
from arb_ternary_track.tracker import Tracker

#: The library that each class of options is for.
_LIBRARIES: Final[Mapping[type, str]] = {
    TensorboardConfig: "tensorboard",
    WandbConfig: "wandb",
    TrackioConfig: "trackio",
}


def build(config: TrackerConfig) -> Tracker:
    """Build the tracker that has such options.

    The library is imported now, so that its absence ends the run before it begins.
    """
    library = _LIBRARIES[type(config)]
    try:
        module: Any = import_module(f"arb_ternary_track.{library}_writer")
    except ImportError as error:
        raise EnvironmentProblem(
            f"tracker {library!r}: needs a package that is not installed: {error.name or library}",
            install_command(f"arb-ternary-track[{library}]"),
        ) from error
    writer = getattr(module, f"{library.capitalize()}Writer")
    return Tracker(library, config, writer(config))
