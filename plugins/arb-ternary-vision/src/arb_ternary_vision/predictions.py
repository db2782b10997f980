"""Classify samples with a model, without disturbing a training run.

Shapes: ``N`` samples, ``V`` classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from arb_ternary.errors import ArbError
from arb_ternary.protocols.data import Batch, MaskContext, MaskingStrategy
from arb_ternary_train.evaluate import evaluation_mode, forward_arguments
from arb_ternary_train.seeding import derived_generator, preserved_global_rng


@frozen(eq=False)
class Predictions:
    """Predictions of a classifier for samples.

    Attributes:
        inputs: inputs of the model, float32 ``[N, C, H, W]``, on the host.
        labels: the right classes, int64 ``[N]``.
        probabilities: float32 ``[N, V]``.
    """

    inputs: Tensor
    labels: NDArray[np.int64]
    probabilities: NDArray[np.float32]

    @property
    def classes(self) -> NDArray[np.int64]:
        """The most likely class of each sample, int64 ``[N]``."""
        found: NDArray[np.int64] = self.probabilities.argmax(axis=1)
        return found

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether the most likely class is the right one, bool ``[N]``."""
        found: NDArray[np.bool_] = self.classes == self.labels
        return found

    def take(self, chosen: NDArray[np.bool_]) -> Predictions:
        """Return the samples for which ``chosen [N]`` is true."""
        return Predictions(
            self.inputs[torch.from_numpy(chosen)], self.labels[chosen], self.probabilities[chosen]
        )

    def confusion(self) -> NDArray[np.int64]:
        """Count the samples by right class (row) and predicted class (column), ``[V, V]``."""
        from sklearn.metrics import confusion_matrix

        every = np.arange(self.probabilities.shape[1])
        counts: NDArray[np.int64] = confusion_matrix(self.labels, self.classes, labels=every)
        return counts


def classify_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    masking: MaskingStrategy,
    *,
    vocabulary_size: int,
    seed: int,
    step: int,
    device: torch.device,
) -> Predictions:
    """Classify held-out ``batches`` as an evaluation would.

    The mode of the model and the global generators are as before afterwards.

    Raises:
        ArbError: the masking does not ask for one class per sample, or there is no sample.
    """
    inputs = []
    labels = []
    probabilities = []
    context = MaskContext(step=step, seed=seed, vocabulary_size=vocabulary_size, training=False)
    with evaluation_mode(model), preserved_global_rng(device), torch.no_grad():
        for index, batch in enumerate(batches):
            generator = derived_generator(seed, "evaluation", index)
            masked = masking.apply(batch, generator, context).to(device)
            logits = model(masked.inputs, **forward_arguments(model, masked))
            if masked.targets.dim() != 1 or masked.targets.is_floating_point() or logits.dim() != 2:
                raise ArbError(
                    "predictions: the model must predict one class per sample",
                    "Train with masking: labels.",
                )
            inputs.append(masked.inputs.cpu())
            labels.append(masked.targets.cpu())
            probabilities.append(logits.float().softmax(dim=1).cpu())
    if not labels:
        raise ArbError("predictions: there is not one sample")
    return Predictions(
        torch.cat(inputs), torch.cat(labels).numpy(), torch.cat(probabilities).numpy()
    )


def class_names(attachments: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of ``count`` classes: those attached to a source or a run, or numbers."""
    names = tuple(map(str, attachments.get("classes", ())))
    return names if len(names) == count else tuple(map(str, range(count)))
