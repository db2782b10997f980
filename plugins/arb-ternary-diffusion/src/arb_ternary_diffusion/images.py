"""Draw images with a trained model, and write many of them into one PNG.

Shapes: ``N`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from attrs import frozen
from PIL import Image
from torch import Tensor, nn

from arb_ternary.config.choice import Choice
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.specs import MaskingSpec
from arb_ternary_diffusion.models.denoiser import DenoisingModel
from arb_ternary_diffusion.noise_config import NoiseConfig
from arb_ternary_diffusion.samplers import SamplerName, draw, guide
from arb_ternary_train.durable import replacing
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_vision.pixels import to_bytes

#: Images that the model predicts together; more save no time on a CPU.
_CHUNK: Final = 256
#: Smallest side of an image in a grid; smaller images are magnified by a whole number.
_MIN_SIDE: Final = 32
#: Pixels between two images of a grid.
_GAP: Final = 2


@frozen(eq=False)
class Denoiser:
    """A model that removes noise from images.

    Attributes:
        model: the model.
        noise: the options of the masking strategy that it was trained with.
    """

    model: DenoisingModel
    noise: NoiseConfig


@frozen(kw_only=True)
class Sampling:
    """How images are drawn; see :func:`arb_ternary_diffusion.samplers.draw`.

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


def require_denoiser(where: str, masking: Choice[MaskingSpec], model: nn.Module) -> Denoiser:
    """Return ``model`` as a denoiser.

    Args:
        where: what error messages begin with.
        masking: the masking strategy that it was trained with.
        model: the model.

    Raises:
        UsageProblem: it was not trained to remove noise from images.
    """
    if not isinstance(masking.options, NoiseConfig) or not isinstance(model, DenoisingModel):
        raise UsageProblem(
            f"{where}: its masking is {masking.name!r}, and images are drawn from a model that was "
            "trained to remove noise",
            "Train with `masking: noise` and the model dit or unet.",
        )
    return Denoiser(model, masking.options)


def find_label(label: str, names: Sequence[str]) -> int:
    """Return the class that ``label`` names, or whose number it is.

    Raises:
        UsageProblem: there is no such class.
    """
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    close = nearest(label, names)
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise UsageProblem(
        f"--label: there is no class {label!r}; classes are {listed}",
        f"Did you mean {close!r}?" if close else "",
    )


def cycle_labels(count: int, classes: int) -> Tensor:
    """Return the classes of ``count`` images, all classes in turn, int64 ``[N]``."""
    return torch.arange(count) % classes


@torch.no_grad()
def draw_images(
    denoiser: Denoiser,
    labels_N: Tensor,
    sampling: Sampling,
    *,
    generator: torch.Generator,
    device: torch.device,
) -> Tensor:
    """Draw an image of each label, float32 ``[N, C, H, W]`` in [-1, 1], on the host.

    The model is in evaluation mode meanwhile. Each image has a generator of its own that
    ``generator`` seeds, so that the first images of a seed do not depend on how many there are.

    Args:
        denoiser: the model.
        labels_N: classes, on the host.
        sampling: how images are drawn.
        generator: source of all randomness, on the host.
        device: the device of the model.

    Raises:
        UsageProblem: guidance is used with a model that was not trained on images of any class.
    """
    noise = denoiser.noise
    if sampling.guidance != 1.0 and not noise.label_dropout:
        raise UsageProblem(
            f"guidance {sampling.guidance}: the model was trained with label_dropout 0, so it "
            "knows no images of any class to compare with",
            "Train with `masking: {name: noise, label_dropout: 0.1}`, or draw with guidance 1.",
        )
    model = denoiser.model
    seeds = torch.randint(2**62, (len(labels_N),), generator=generator).tolist()
    drawn = [torch.zeros(0, *model.shape)]
    with evaluation_mode(model):
        for first in range(0, len(labels_N), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            labels_B = labels_N[chunk].to(device)
            fresh = _NoiseSource(seeds[chunk], model.shape)

            def conditional(x: Tensor, time: Tensor, labels_B: Tensor = labels_B) -> Tensor:
                predicted: Tensor = model(x, time, labels_B)
                return predicted

            images = draw(
                guide(conditional, model, sampling.guidance),
                fresh().to(device),
                prediction=noise.prediction,
                schedule=noise.schedule,
                steps=sampling.steps,
                sampler=sampling.sampler,
                eta=sampling.eta,
                fresh=fresh,
            )
            drawn.append(images.cpu())
    return torch.cat(drawn)


class _NoiseSource:
    """Draws Gaussian noise for images, each from a generator of its own.

    Args:
        seeds: one seed per image.
        shape: shape of an image.
    """

    def __init__(self, seeds: Sequence[int], shape: tuple[int, ...]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._shape = shape

    def __call__(self) -> Tensor:
        """Return the next noise, ``[B, C, H, W]``."""
        noise = [torch.randn(self._shape, generator=each) for each in self._generators]
        return torch.stack(noise)


def write_grid(path: Path, images_NCHW: Tensor) -> None:
    """Write images in [-1, 1] into one PNG, row by row in a square, whole or not at all.

    Raises:
        ArbError: the images have neither one channel (grey) nor three (red, green and blue).
        OSError: the file cannot be written.
    """
    count, channels, height, width = images_NCHW.shape
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    scale = max(1, -(-_MIN_SIDE // min(height, width)))
    large = images_NCHW.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    # Gaps are 0, the grey between black and white.
    tiles = F.pad(large, (0, _GAP, 0, _GAP, 0, 0, 0, rows * columns - count))
    down, across = tiles.shape[2:]
    grid = tiles.view(rows, columns, channels, down, across).permute(2, 0, 3, 1, 4)
    sheet = grid.reshape(channels, rows * down, columns * across)[:, :-_GAP, :-_GAP]
    with replacing(path) as temporary:
        Image.fromarray(to_bytes(sheet.numpy())).save(temporary, format="PNG")
