"""The masking strategy ``noise``."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_diffusion.noise import alpha_bar
from arb_ternary_diffusion.noise_config import NoiseConfig, PredictionName
from arb_ternary_diffusion.noise_masking import NoiseMasking
from arb_ternary_train.protocols import OwnLosses

TRAINING = MaskContext(step=3, seed=0, vocabulary_size=10)
EVALUATION = MaskContext(step=3, seed=0, vocabulary_size=10, training=False)


def batch(count: int = 64) -> Batch:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return Batch(images, torch.arange(count), {"labels": torch.arange(count) % 10})


def masked(
    context: MaskContext = TRAINING, seed: int = 1, count: int = 64, **options: Any
) -> MaskedBatch:
    strategy = NoiseMasking(NoiseConfig(**options))
    assert isinstance(strategy, OwnLosses)
    return strategy.apply(batch(count), torch.Generator().manual_seed(seed), context)


def test_inputs_mix_image_and_noise_by_time() -> None:
    noisy = masked(prediction="epsilon", schedule="linear")
    assert noisy.times is not None
    kept = alpha_bar("linear", noisy.times)[:, None, None, None]
    expected = kept.sqrt() * batch().data + (1 - kept).sqrt() * noisy.targets
    torch.testing.assert_close(noisy.inputs.double(), expected, rtol=0, atol=1e-6)
    assert float(noisy.targets.mean()) == pytest.approx(0, abs=5 / math.sqrt(1024))
    assert float(noisy.targets.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * 1024))


@pytest.mark.parametrize("prediction", get_args(PredictionName))
def test_targets_are_of_the_same_image_and_noise(prediction: PredictionName) -> None:
    noisy = masked(prediction=prediction)
    noise = masked(prediction="epsilon").targets
    assert noisy.times is not None
    kept = alpha_bar("cosine", noisy.times).float()[:, None, None, None]
    known = {
        "x0": batch().data,
        "epsilon": noise,
        "v": kept.sqrt() * noise - (1 - kept).sqrt() * batch().data,
    }
    torch.testing.assert_close(noisy.targets, known[prediction], rtol=0, atol=1e-6)


def test_training_times_are_evenly_spaced() -> None:
    first = masked(seed=1).times
    second = masked(seed=2).times
    assert first is not None
    assert second is not None
    for times in (first, second):
        torch.testing.assert_close(
            times.sort().values.diff(), torch.full((63,), 1 / 64), rtol=0, atol=1e-5
        )
        assert 0 <= times.min() < 1 / 64 + 1e-6
    assert float(first.min()) != float(second.min())
    assert not torch.equal(first, first.sort().values)


def test_evaluation_has_fixed_times_and_all_classes() -> None:
    noisy = masked(EVALUATION, label_dropout=1.0)
    assert noisy.times is not None
    torch.testing.assert_close(
        noisy.times.sort().values, (torch.arange(64) + 0.5) / 64, rtol=0, atol=1e-6
    )
    assert torch.equal(noisy.arguments["labels"], batch().extras["labels"])
    again = masked(EVALUATION, label_dropout=1.0)
    assert torch.equal(noisy.inputs, again.inputs)
    assert torch.equal(noisy.times, again.times)  # type: ignore[arg-type]


def test_label_dropout_is_the_share_of_dropped_classes() -> None:
    def dropped(share: float) -> float:
        labels = masked(count=4000, label_dropout=share).arguments["labels"]
        kept = labels != 10
        assert torch.equal(labels[kept], batch(4000).extras["labels"][kept])
        return float((~kept).float().mean())

    assert dropped(0.0) == 0
    assert dropped(0.3) == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 4000))
    assert dropped(1.0) == 1


def test_images_without_classes_have_no_labels() -> None:
    noisy = NoiseMasking(NoiseConfig()).apply(
        Batch(batch().data, torch.arange(64)), torch.Generator().manual_seed(0), TRAINING
    )
    assert noisy.arguments == {}


def test_loss_is_the_mean_squared_error() -> None:
    noisy = masked()
    output = noisy.targets + torch.arange(64.0)[:, None, None, None]
    found = NoiseMasking(NoiseConfig()).losses(output, noisy)
    assert found.shape == noisy.loss_mask.shape
    torch.testing.assert_close(found, torch.arange(64.0).square(), rtol=1e-5, atol=1e-5)


def test_masking_refuses_ids_of_text() -> None:
    with pytest.raises(DataError, match=r"int64 \[2, 9\], not images"):
        NoiseMasking(NoiseConfig()).apply(
            Batch(torch.zeros(2, 9, dtype=torch.int64), torch.arange(2)),
            torch.Generator(),
            TRAINING,
        )
