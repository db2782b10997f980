"""Register the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import TrackerSpec
from arb_ternary_track.variables import TRACKIO, WANDB

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "runs in TensorBoard, Weights & Biases and trackio"}


@hookimpl
def arb_register_trackers() -> Sequence[TrackerSpec]:
    return (
        TrackerSpec(
            name="tensorboard",
            target="arb_ternary_track.factories:build",
            config="arb_ternary_track.config:TensorboardConfig",
            summary="curves and histograms of a run in TensorBoard",
        ),
        TrackerSpec(
            name="wandb",
            target="arb_ternary_track.factories:build",
            config="arb_ternary_track.config:WandbConfig",
            variables=WANDB,
            summary="curves and histograms of a run in Weights & Biases; offline without a key",
        ),
        TrackerSpec(
            name="trackio",
            target="arb_ternary_track.factories:build",
            config="arb_ternary_track.config:TrackioConfig",
            variables=TRACKIO,
            summary="curves and histograms of a run in trackio, on this machine",
        ),
    )
