"""Compare drawn with real images: Frechet distances of pixels, and of a classifier's features.

Shapes: ``N`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.protocols.data import DataSource
from arb_ternary_train.evaluate import evaluation_mode

#: Images that are read, or classified, together.
_CHUNK: Final = 256

#: Maps images float32 ``[N, C, H, W]`` to what is compared, ``[N, ...]``.
Features = Callable[[Tensor], NDArray[Any]]


@frozen(eq=False)
class RealImages:
    """The images of a data source, in [-1, 1].

    Attributes:
        train: training images, ``[N, C, H, W]``.
        held_out: held-out images.
        held_out_labels: classes of the held-out images, int64 ``[N]``; None if there are none.
    """

    train: Tensor
    held_out: Tensor
    held_out_labels: Tensor | None


@frozen
class Distances:
    """Squared Frechet distances to the training images.

    Attributes:
        drawn: distance of the drawn images.
        held_out: distance of the held-out images, which images as good as real ones reach.
        images: number of drawn images, and of held-out ones.
    """

    drawn: float
    held_out: float
    images: int


def read_real_images(data: DataSource) -> RealImages:
    """Read all images of ``data`` once.

    Raises:
        DataError: the samples are not images.
    """
    train_in_order = getattr(getattr(data, "train", None), "in_order", None)
    held_out = list(data.held_out(_CHUNK, 1, None))
    if train_in_order is None or not held_out or not held_out[0].data.is_floating_point():
        raise DataError(
            f"data {data.name!r}: its training samples are not images that can be read in order"
        )
    labels = [batch.extras["labels"] for batch in held_out if "labels" in batch.extras]
    return RealImages(
        torch.cat([batch.data for batch in train_in_order(_CHUNK, None)]),
        torch.cat([batch.data for batch in held_out]),
        torch.cat(labels) if labels else None,
    )


def pixels(images_NCHW: Tensor) -> NDArray[Any]:
    """Return the pixels of images, ``[N, C H W]``."""
    return np.asarray(images_NCHW.flatten(1).numpy())


def classifier_features(where: str, classifier: nn.Module, device: torch.device) -> Features:
    """Return a function that computes the input of a classifier's head, ``[N, F]``.

    Args:
        where: what error messages begin with.
        classifier: the model.
        device: its device.

    Raises:
        UsageProblem: it has no module ``head``.
    """
    head = getattr(classifier, "head", None)
    if not isinstance(head, nn.Module):
        raise UsageProblem(
            f"{where}: the model has no head whose input could be compared; use a vit or a convnet"
        )

    @torch.no_grad()
    def features(images_NCHW: Tensor) -> NDArray[Any]:
        seen: list[Tensor] = []

        def keep_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0].float().cpu())

        hook = head.register_forward_pre_hook(keep_input)
        try:
            with evaluation_mode(classifier):
                for chunk_BCHW in torch.split(images_NCHW, _CHUNK):
                    classifier(chunk_BCHW.to(device))
        finally:
            hook.remove()
        return np.asarray(torch.cat(seen).flatten(1).numpy())

    return features


def compare_images(drawn_NCHW: Tensor, real: RealImages, features: Features = pixels) -> Distances:
    """Compute the distances of drawn and of held-out images to the training images.

    Both sets are cut to the size of the smaller one, because a distance grows as samples get fewer.
    """
    # torchmetrics takes seconds to import.
    from arb_ternary_diffusion.frechet import frechet_distance

    count = min(len(drawn_NCHW), len(real.held_out))
    train = features(real.train)
    return Distances(
        frechet_distance(features(drawn_NCHW[:count]), train),
        frechet_distance(features(real.held_out[:count]), train),
        count,
    )
