"""The ladder's AdamW with moments in 8 bits: its code, its rounding and its steps against a
restatement in float64.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

STUDY = Path(__file__).parents[1] / "studies" / "ladder_adamw8.py"
LR = 0.01
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
DECAY = 0.1


@pytest.fixture(scope="module")
def adamw8() -> ModuleType:
    spec = importlib.util.spec_from_file_location(STUDY.stem, STUDY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[STUDY.stem] = module
    spec.loader.exec_module(module)
    return module


def test_a_code_has_256_values_from_a_millionth_to_one(adamw8: ModuleType) -> None:
    signed, unsigned = (adamw8.dynamic_code(signed=each) for each in (True, False))
    assert len(set(signed.tolist())) == len(set(unsigned.tolist())) == 256
    assert unsigned.min() == 0
    assert unsigned.max() == signed.max() == 1
    assert unsigned[1].item() == pytest.approx(3.25e-7)
    assert signed[128].item() == pytest.approx(5.5e-7)
    # The uppermost decade of 64 values of a sign, half a step below one.
    assert signed.min().item() == pytest.approx(-(1 - 0.9 / 64 / 2))
    # Without signs each decade has twice as many: 2, 4, ..., 128.
    assert sum(0.1 < value < 1 for value in unsigned.tolist()) == 128


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_value_of_its_block(adamw8: ModuleType, signed: bool) -> None:
    random = np.random.default_rng(0)
    numbers = (random.standard_normal(1000) * 10.0 ** random.uniform(-9, 3, 1000)).astype(
        np.float32
    )
    numbers[300:310] = 0.0
    if not signed:
        numbers = np.abs(numbers)
    moment = adamw8.CodedMoment(signed=signed)
    codes, scales = moment.encode(torch.from_numpy(numbers))
    assert codes.dtype == torch.uint8
    assert codes.shape == (1000,)
    assert scales.shape == (4,)
    values = adamw8.dynamic_code(signed=signed).double().numpy()
    for block in range(4):
        part = numbers[256 * block :][:256].astype(np.float64)
        scale = np.abs(part).max()
        nearest = np.abs(part[:, None] / scale - values).min(axis=1)
        found = np.abs(part / scale - values[codes[256 * block :][:256].numpy()])
        # A share that float32 rounds to the middle of two values is as near to either.
        np.testing.assert_allclose(found, nearest, atol=2**-24)
        assert scales[block].item() == scale
    assert torch.equal(moment.decode(codes, scales)[300:310], torch.zeros(10))


def test_codes_of_all_zeros_stand_for_zeros(adamw8: ModuleType) -> None:
    moment = adamw8.CodedMoment(signed=True)
    assert torch.equal(moment.decode(*moment.encode(torch.zeros(300))), torch.zeros(300))


def _gradients(shape: tuple[int, ...], steps: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape) for _ in range(steps)]


def _restated(weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    first = np.zeros_like(weight)
    second = np.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient**2
        weight = weight * (1 - LR * DECAY)
        weight = weight - LR * (first / (1 - BETA1**step)) / (
            np.sqrt(second / (1 - BETA2**step)) + EPS
        )
    return weight


def _trained(
    adamw8: ModuleType, weight: np.ndarray, gradients: list[np.ndarray], saved_at: int | None = None
) -> object:
    parameter = torch.nn.Parameter(torch.from_numpy(weight).float())

    def made() -> torch.optim.Optimizer:
        group = {"params": [parameter], "weight_decay": DECAY}
        optimizer: torch.optim.Optimizer = adamw8.AdamW8([group], LR, (BETA1, BETA2), EPS)
        return optimizer

    optimizer = made()
    for step, gradient in enumerate(gradients):
        if step == saved_at:
            state = optimizer.state_dict()
            optimizer = made()
            optimizer.load_state_dict(state)
        parameter.grad = torch.from_numpy(gradient).float()
        optimizer.step()
    return parameter.detach().double().numpy(), optimizer


def test_moments_of_small_tensors_are_those_of_adamw(adamw8: ModuleType) -> None:
    weight = _gradients((60, 60), 1)[0]
    gradients = _gradients((60, 60), 7)
    found, _ = _trained(adamw8, weight, gradients)
    np.testing.assert_allclose(found, _restated(weight, gradients), rtol=0, atol=2e-6)


def _decoded(
    adamw8: ModuleType, state: dict[str, torch.Tensor], name: str, signed: bool
) -> np.ndarray:
    values = adamw8.dynamic_code(signed=signed).double().numpy()
    return values[state[name].numpy()] * state[f"{name}_scales"].double().numpy().repeat(256)


def test_every_step_is_that_of_adamw_on_the_moments_that_are_kept(adamw8: ModuleType) -> None:
    weight = _gradients((64, 80), 1)[0].reshape(-1)
    gradients = [each.reshape(-1) for each in _gradients((64, 80), 6)]
    parameter = torch.nn.Parameter(torch.from_numpy(weight).float())
    optimizer = adamw8.AdamW8(
        [{"params": [parameter], "weight_decay": DECAY}], LR, (BETA1, BETA2), EPS
    )
    first = np.zeros_like(weight)
    second = np.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        before = parameter.detach().double().numpy()
        parameter.grad = torch.from_numpy(gradient).float()
        optimizer.step()
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient**2
        moved = LR * (first / (1 - BETA1**step)) / (np.sqrt(second / (1 - BETA2**step)) + EPS)
        np.testing.assert_allclose(
            parameter.detach().double().numpy(),
            before * (1 - LR * DECAY) - moved,
            rtol=1e-5,
            atol=1e-6,
        )
        state = optimizer.state[parameter]
        for name, moment, steps in (("first", first, 64), ("second", second, 128)):
            kept = _decoded(adamw8, state, name, signed=name == "first")
            # At most half a step of the uppermost decade, of the largest in a block; its ends are
            # half a step from one.
            bound = (
                0.9 / steps / 2 * 1.001 * np.abs(moment).reshape(-1, 256).max(axis=1).repeat(256)
            )
            assert (np.abs(kept - moment) <= bound).all()
            assert np.abs(kept - moment).max() > 0
        first = _decoded(adamw8, state, "first", True)
        second = _decoded(adamw8, state, "second", False)
    counted = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert counted == 2 * (64 * 80 + 20 * 4)


def test_a_state_that_is_saved_and_loaded_goes_on_with_the_same_bits(adamw8: ModuleType) -> None:
    weight = _gradients((64, 80), 1)[0]
    gradients = _gradients((64, 80), 5)
    whole, _ = _trained(adamw8, weight, gradients)
    resumed, optimizer = _trained(adamw8, weight, gradients, saved_at=3)
    assert np.array_equal(whole, resumed)
    state = next(iter(optimizer.state.values()))
    assert state["first"].dtype == state["second"].dtype == torch.uint8
