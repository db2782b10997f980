"""The tracker ``sample_grid``: pictures that the model draws, at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import option, positive
from arb_ternary.errors import ArbError

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen(kw_only=True)
class SampleGridConfig:
    """Options of the tracker ``sample_grid``."""

    folder: str = option("samples", "where the pictures go; relative to the run directory")
    count: int = option(100, "pictures in a grid, of all classes in turn", validator=positive)
    steps: int = option(25, "passes through the model for a picture", validator=positive)
    guidance: float = option(1.0, "beyond 1, pictures are led towards their class; twice the time")
    seed: int = option(0, "of the noise that the pictures come from, the same each time")


class SampleGrid:
    """Writes ``<folder>/step-<n>.png``; a picture's noise is the same in each, so that they can be
    compared.

    The run goes on as if nothing had been drawn: the model's modes are put back, no vote is cast,
    and all randomness comes from a generator of the tracker's own.
    """

    def __init__(self, config: SampleGridConfig) -> None:
        self.config = config

    @hookimpl
    def arb_run_start(self, context: TrainingContext) -> None:
        from arb_ternary_diffusion.pictures import denoiser_of

        denoiser_of("sample_grid", context.config.masking, context.model)

    @hookimpl
    def arb_eval_end(self, context: TrainingContext, step: int, metrics: Mapping[str, Any]) -> None:
        import torch

        from arb_ternary_diffusion.pictures import (
            Sampling,
            denoiser_of,
            draw_pictures,
            labels_of,
            write_grid,
        )
        from arb_ternary_train.seeding import preserved_global_rng

        config = self.config
        denoiser = denoiser_of("sample_grid", context.config.masking, context.model)
        path = context.directory / config.folder / f"step-{step:08d}.png"
        with preserved_global_rng(context.device):
            pictures = draw_pictures(
                denoiser,
                labels_of(None, config.count, denoiser.classes, None),
                Sampling(steps=config.steps, guidance=config.guidance),
                generator=torch.Generator().manual_seed(config.seed),
                device=context.device,
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_grid(path, pictures)
        except OSError as error:
            raise ArbError(f"{path}: cannot be written: {error}") from error


def build(config: SampleGridConfig) -> SampleGrid:
    """The factory that the tracker ``sample_grid`` registers."""
    return SampleGrid(config)
