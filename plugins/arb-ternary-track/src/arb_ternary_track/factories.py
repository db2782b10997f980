"""Build the trackers; say what to install if a library is absent."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_track.config import (
    TensorboardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)
from arb_ternary_track.tracker import Tracker


def build_tensorboard(config: TensorboardConfig) -> Tracker:
    """Build the tracker ``tensorboard``."""
    return _build("tensorboard", config)


def build_wandb(config: WandbConfig) -> Tracker:
    """Build the tracker ``wandb``."""
    return _build("wandb", config)


def build_trackio(config: TrackioConfig) -> Tracker:
    """Build the tracker ``trackio``."""
    return _build("trackio", config)


def _build(library: str, config: TrackerConfig) -> Tracker:
    """Import the library now, so that its absence ends the run before it begins."""
    try:
        module: Any = import_module(f"arb_ternary_track.{library}_writer")
    except ImportError as error:
        raise EnvironmentProblem(
            f"tracker {library!r}: needs a package that is not installed: {error.name or library}",
            install_command(f"arb-ternary-track[{library}]"),
        ) from error
    writer = getattr(module, f"{library.capitalize()}Writer")
    return Tracker(library, config, writer(config))
