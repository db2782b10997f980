"""How far drawn pictures are from real ones: Frechet distances of pixels, and of the features of a
classifier.

Shapes: ``N`` pictures, ``C`` channels, ``H`` and ``W`` pixels, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.protocols.data import DataSource
from arb_ternary_diffusion.frechet import frechet_distance, moments_of
from arb_ternary_train.evaluate import evaluation_mode

_TOGETHER = 256

#: Pictures float32 ``[N, C, H, W]`` to what is compared, ``[N, ...]``.
Features = Callable[[Tensor], NDArray[Any]]


@frozen(eq=False)
class Pictures:
    """Real pictures of a data source, in [-1, 1].

    Attributes:
        train: those that models learn from, ``[N, C, H, W]``.
        held_out: the others.
        held_out_labels: their classes, int64 ``[N]``; None where the data has none.
    """

    train: Tensor
    held_out: Tensor
    held_out_labels: Tensor | None


@frozen
class Distances:
    """Frechet distances to the training pictures, squared.

    Attributes:
        drawn: of the drawn pictures.
        held_out: of the held-out ones: what pictures have that are as good as real.
        pictures: how many were drawn; as many are held out.
    """

    drawn: float
    held_out: float
    pictures: int


def real_pictures(data: DataSource) -> Pictures:
    """All pictures of ``data``, read once.

    Raises:
        DataError: samples are no pictures.
    """
    train = getattr(getattr(data, "train", None), "in_order", None)
    held_out = [*data.held_out(_TOGETHER, 1, None)]
    if train is None or not held_out or not held_out[0].data.is_floating_point():
        raise DataError(
            f"data {data.name!r}: its training samples are no pictures that can be read one after "
            f"another"
        )
    labels = [batch.extras["labels"] for batch in held_out if "labels" in batch.extras]
    return Pictures(
        torch.cat([batch.data for batch in train(_TOGETHER, None)]),
        torch.cat([batch.data for batch in held_out]),
        torch.cat(labels) if labels else None,
    )


def pixels(pictures_NCHW: Tensor) -> NDArray[Any]:
    """The pixels themselves, ``[N, C H W]``."""
    return np.asarray(pictures_NCHW.flatten(1).numpy())


def features_of(where: str, classifier: nn.Module, device: torch.device) -> Features:
    """What enters the head of ``classifier``, ``[N, F]``.

    Raises:
        UsageProblem: it has no module ``head``; ``where`` says whose it is.
    """
    head = getattr(classifier, "head", None)
    if not isinstance(head, nn.Module):
        raise UsageProblem(
            f"{where}: the model has no head whose input could be compared; take a vit or a convnet"
        )

    @torch.no_grad()
    def features(pictures_NCHW: Tensor) -> NDArray[Any]:
        seen: list[Tensor] = []
        hook = head.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].float().cpu())
        )
        try:
            with evaluation_mode(classifier):
                for some_BCHW in torch.split(pictures_NCHW, _TOGETHER):
                    classifier(some_BCHW.to(device))
        finally:
            hook.remove()
        return np.asarray(torch.cat(seen).flatten(1).numpy())

    return features


def distances(drawn_NCHW: Tensor, real: Pictures, features: Features = pixels) -> Distances:
    """Of drawn and of held-out pictures, both to the training pictures.

    A distance grows as samples get fewer: both sets have the same number, the smaller of the two.
    """
    count = min(len(drawn_NCHW), len(real.held_out))
    known = moments_of(features(real.train))
    found = [
        frechet_distance(moments_of(features(some[:count])), known)
        for some in (drawn_NCHW, real.held_out)
    ]
    return Distances(found[0], found[1], count)
