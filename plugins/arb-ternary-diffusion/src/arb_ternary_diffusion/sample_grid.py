"""The tracker ``sample_grid``: images that the model draws at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import LARGEST_INT64, non_negative, option, positive
from arb_ternary.errors import ArbError

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Most images of a grid, and most evaluations per image, as for ``arb generate``.
_MOST: Final = 10_000


@frozen(kw_only=True)
class SampleGridConfig:
    """Options of the tracker ``sample_grid``."""

    folder: str = option("samples", "folder of the images, relative to the run directory")
    count: int = option(
        100, "images in a grid, of all classes in turn", validator=positive, largest=_MOST
    )
    steps: int = option(25, "evaluations of the model per image", validator=positive, largest=_MOST)
    guidance: float = option(
        1.0, "above 1, images are more typical of their class, and take twice the time"
    )
    seed: int = option(
        0,
        "seed of the noise that images are drawn from, the same every time",
        validator=non_negative,
        largest=LARGEST_INT64,
    )


class SampleGrid:
    """Writes ``<folder>/step-<n>.png``, always from the same noise, so that they can be compared.

    It does not change the run: the model's modes are restored, no vote is cast, and all randomness
    comes from a generator of its own.
    """

    def __init__(self, config: SampleGridConfig) -> None:
        self.config = config

    @hookimpl
    def arb_run_start(self, context: TrainingContext) -> None:
        from arb_ternary_diffusion.images import require_denoiser

        require_denoiser("sample_grid", context.config.masking, context.model)

    @hookimpl
    def arb_eval_end(self, context: TrainingContext, step: int, metrics: Mapping[str, Any]) -> None:
        # Imported here, because a config is read without torch.
        import torch

        from arb_ternary_diffusion.images import (
            Sampling,
            cycle_labels,
            draw_images,
            require_denoiser,
            write_grid,
        )
        from arb_ternary_train.seeding import preserved_global_rng

        config = self.config
        denoiser = require_denoiser("sample_grid", context.config.masking, context.model)
        path = context.directory / config.folder / f"step-{step:08d}.png"
        with preserved_global_rng(context.device):
            images = draw_images(
                denoiser,
                cycle_labels(config.count, denoiser.model.classes),
                Sampling(steps=config.steps, guidance=config.guidance),
                generator=torch.Generator().manual_seed(config.seed),
                device=context.device,
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_grid(path, images)
        except OSError as error:
            raise ArbError(f"{path}: cannot be written: {error}") from error


def build(config: SampleGridConfig) -> SampleGrid:
    """Build the tracker ``sample_grid``."""
    return SampleGrid(config)
