"""Pictures from a trained model, and many of them in one PNG.

Shapes: ``N`` pictures, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen
from PIL import Image
from torch import Tensor, nn

from arb_ternary.config.choice import Choice
from arb_ternary.errors import DataError, UsageProblem, nearest
from arb_ternary.specs import MaskingSpec
from arb_ternary_diffusion.noise_config import NoiseConfig
from arb_ternary_diffusion.samplers import SamplerName, draw, guided
from arb_ternary_train.durable import replacing
from arb_ternary_train.evaluate import evaluation_mode

#: Pictures that pass the model together: more save no time on a CPU.
_TOGETHER = 256
# : A picture in a grid has so many pixels a side at least; smaller ones are magnified by a whole
# number.
_LEAST_SIDE = 32
_GAP = 2


@runtime_checkable
class Denoises(Protocol):
    """What a model has that takes noise away from pictures: classes that it knows, and their ``(C,
    H, W)``.
    """

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]: ...


@frozen(eq=False)
class Denoiser:
    """A model that takes noise away from pictures, and what it was taught.

    Attributes:
        model: ``(noisy [B, C, H, W], time [B], labels [B] or None)`` to what it predicts.
        noise: the options of its masking strategy.
        classes: how many it knows.
        shape: ``(C, H, W)``.
    """

    model: nn.Module
    noise: NoiseConfig
    classes: int
    shape: tuple[int, int, int]


@frozen(kw_only=True)
class Sampling:
    """How pictures are drawn; see :func:`arb_ternary_diffusion.samplers.draw`.

    Raises:
        UsageProblem: ``eta`` or ``guidance`` is not finite.
    """

    steps: int = 50
    sampler: SamplerName = "ddim"
    eta: float = 0.0
    guidance: float = 1.0

    def __attrs_post_init__(self) -> None:
        for name, value in (("eta", self.eta), ("guidance", self.guidance)):
            if not math.isfinite(value):
                raise UsageProblem(f"{name}: must be a finite number, not {value}")


def denoiser_of(where: str, masking: Choice[MaskingSpec], model: nn.Module) -> Denoiser:
    """``model`` as a denoiser.

    Raises:
        UsageProblem: it was trained on something else, or denoises no pictures; ``where`` says
            whose it is.
    """
    if not isinstance(masking.options, NoiseConfig) or not isinstance(model, Denoises):
        raise UsageProblem(
            f"{where}: its masking is {masking.name!r}, and pictures are drawn from a model that "
            "learned to take noise away",
            "Train with `masking: noise` and the model dit or unet.",
        )
    return Denoiser(model, masking.options, model.classes, model.shape)


def labels_of(label: str | None, count: int, classes: int, names: list[str] | None) -> Tensor:
    """Classes of ``count`` pictures, int64 ``[N]``: all in turn, or the one that ``label`` names or
    counts.

    Raises:
        UsageProblem: there is no such class.
    """
    if label is None:
        return torch.arange(count) % max(1, classes)
    known = [str(number) for number in range(classes)] if names is None else names
    if label in known:
        return torch.full((count,), known.index(label))
    if label.isdecimal() and int(label) < classes:
        return torch.full((count,), int(label))
    close = nearest(label, known)
    raise UsageProblem(
        f"--label: there is no class {label!r}; classes are "
        f"{', '.join(known[:20])}{', ...' if classes > 20 else ''}",
        f"Did you mean {close!r}?" if close else "",
    )


@torch.no_grad()
def draw_pictures(
    denoiser: Denoiser,
    labels_N: Tensor,
    sampling: Sampling,
    *,
    generator: torch.Generator,
    device: torch.device,
) -> Tensor:
    """A picture of each label, float32 ``[N, C, H, W]`` in [-1, 1], on the host.

    The model is in evaluation mode meanwhile. All randomness comes from ``generator``, picture
    after picture, so that a seed's first pictures do not depend on how many there are.

    Args:
        denoiser: the model.
        labels_N: classes, on the host.
        sampling: how.
        generator: of the host.
        device: of the model.

    Raises:
        UsageProblem: guidance of a model that does not know pictures of any class.
    """
    if sampling.guidance != 1.0 and not denoiser.noise.label_dropout:
        raise UsageProblem(
            f"guidance {sampling.guidance}: the model was trained with label_dropout 0, and knows "
            "no pictures of any class to be led away from",
            "Train with `masking: {name: noise, label_dropout: 0.1}`, or draw with guidance 1.",
        )
    model = denoiser.model
    shape = denoiser.shape
    seeds = torch.randint(2**62, (len(labels_N),), generator=generator).tolist()
    drawn: list[Tensor] = []
    with evaluation_mode(model):
        for first in range(0, len(labels_N), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            own = [torch.Generator().manual_seed(seed) for seed in seeds[some]]
            start = torch.stack([torch.randn(shape, generator=each) for each in own])
            labels_B = labels_N[some].to(device)
            pictures = draw(
                guided(
                    lambda x, time, labels=labels_B: model(x, time, labels),  # type: ignore[misc]
                    model,
                    sampling.guidance,
                ),
                start.to(device),
                prediction=denoiser.noise.prediction,
                schedule=denoiser.noise.schedule,
                steps=sampling.steps,
                sampler=sampling.sampler,
                eta=sampling.eta,
                fresh=lambda own=own: torch.stack(
                    [torch.randn(shape, generator=each) for each in own]
                ),  # type: ignore[misc]
            )
            drawn.append(pictures.cpu())
    return torch.cat(drawn) if drawn else torch.zeros(0, *shape)


def write_grid(path: Path, pictures_NCHW: Tensor, *, columns: int | None = None) -> None:
    """Write ``pictures`` (values in [-1, 1]: black to white, or red, green and blue) into one PNG,
    row by row.

    Args:
        path: the file; replaced only whole.
        pictures_NCHW: of 1 or 3 channels.
        columns: pictures in a row; None = as many as make a square.

    Raises:
        DataError: there is no picture, or of other channels.
        OSError: the file cannot be written.
    """
    count, channels, height, width = pictures_NCHW.shape
    if not count or channels not in (1, 3):
        raise DataError(
            f"{path}: a PNG holds pictures of 1 or 3 channels, not {count} of {channels}"
        )
    across = min(count, columns or math.ceil(math.sqrt(count)))
    down = -(-count // across)
    scale = max(1, -(-_LEAST_SIDE // min(height, width)))
    levels = (pictures_NCHW.clamp(-1, 1) + 1).mul(127.5).round().to(torch.uint8)
    large = levels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    rows = scale * height + _GAP
    line = scale * width + _GAP
    sheet = torch.full((channels, down * rows - _GAP, across * line - _GAP), 128, dtype=torch.uint8)
    for number, picture in enumerate(large):
        top = rows * (number // across)
        left = line * (number % across)
        sheet[:, top : top + rows - _GAP, left : left + line - _GAP] = picture
    whole = Image.fromarray(
        sheet[0].numpy() if channels == 1 else sheet.movedim(0, -1).contiguous().numpy()
    )
    with replacing(path) as temporary:
        whole.save(temporary, format="PNG")


def class_names(attached: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes among what a run keeps of its data; None where it has none."""
    names = attached.get("classes")
    return [str(name) for name in names] if isinstance(names, list) else None
