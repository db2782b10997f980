"""The masking strategies mlm, progressive and time_step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import asdict, evolve

from arb_ternary.errors import ConfigError, DataError, UsageProblem
from arb_ternary.protocols.data import Batch, MaskContext
from arb_ternary_progressive.masking import (
    GrowthContext,
    MlmMasking,
    ProgressiveMasking,
    TimeStepMasking,
    progressive_fraction,
)
from arb_ternary_progressive.masking_config import (
    MlmConfig,
    ProgressiveMaskingConfig,
    TimeStepConfig,
)
from arb_ternary_progressive.stackwise import StackWiseConfig
from arb_ternary_testing import MaskingSuite
from arb_ternary_testing.component import make_choice

CONTEXT = GrowthContext(step=12, seed=5, vocabulary_size=60)


class AtATime(MaskingSuite):
    """The suite at a time that the phase sets."""

    def make_context(self, **changes: Any) -> MaskContext:
        return GrowthContext(**asdict(super().make_context(**changes)), time=0.5)


class TestMlm(AtATime):
    component = "mlm"


class TestProgressive(AtATime):
    component = "progressive"


class TestTimeStep(AtATime):
    component = "time_step"


class TestTimeStepWithTimesBySample(MaskingSuite):
    component = "time_step"
    options: Mapping[str, Any] = {"time_interpretation": "input", "time_sampling": "sample"}


class TestTimeStepWithTimesByBatch(MaskingSuite):
    component = "time_step"
    options: Mapping[str, Any] = {
        "time_interpretation": "input",
        "fractions": {0: 0.2, 7: 1.0},
        "mask_token_id": 3,
    }


def batch(rows: int = 6, positions: int = 40, seed: int = 0, vocabulary: int = 59) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, positions + 1), generator=generator)
    return Batch(tokens, torch.randperm(100, generator=generator)[:rows])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hidden_share(strategy: Any, positions: int = 1000, **context: Any) -> float:
    masked = strategy.apply(batch(2, positions), generator(), evolve(CONTEXT, **context))
    counts = masked.loss_mask.sum(dim=1)
    assert counts[0] == counts[1]
    return int(counts[0]) / positions


# --- all of them


@pytest.mark.parametrize("make", [MlmMasking, ProgressiveMasking, TimeStepMasking])
def test_targets_are_the_tokens_and_only_hidden_ones_change(make: Any) -> None:
    samples = batch()
    masked = make().apply(samples, generator(), CONTEXT)
    tokens = samples.data[:, :-1]
    assert torch.equal(masked.targets, tokens)
    assert torch.equal(masked.inputs[~masked.loss_mask], tokens[~masked.loss_mask])
    assert not torch.equal(masked.inputs, tokens)


@pytest.mark.parametrize("make", [MlmMasking, ProgressiveMasking, TimeStepMasking])
def test_masks_depend_on_time_and_seed_but_not_on_the_step(
    make: Any,
) -> None:
    samples = batch(positions=200)
    strategy = make()

    def mask(**changes: Any) -> torch.Tensor:
        return strategy.apply(
            samples, generator(), evolve(CONTEXT, time=0.5, **{"step": 1, **changes})
        ).inputs

    first = mask()
    assert torch.equal(first, mask(step=999))
    assert not torch.equal(first, mask(seed=6))
    moved = strategy.apply(samples, generator(), evolve(CONTEXT, time=0.9))
    assert not torch.equal(first, moved.inputs)


@pytest.mark.parametrize("make", [ProgressiveMasking, TimeStepMasking])
def test_hidden_tokens_become_the_last_id_by_default(make: Any) -> None:
    masked = make().apply(batch(), generator(), CONTEXT)
    assert bool((masked.inputs[masked.loss_mask] == 59).all())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlm", {}),
        ("progressive", {"mask_share": 0.8}),
        ("time_step", {"mask_share": 0.8, "random_share": 0.1}),
    ],
)
def test_the_shares_of_the_replacement_are_options(name: str, options: Mapping[str, float]) -> None:
    strategy = make_choice("masking", name, options).build()
    masked = strategy.apply(batch(64, 500), generator(), CONTEXT)
    share = float((masked.inputs[masked.loss_mask] == 59).float().mean())
    count = int(masked.loss_mask.sum())
    assert abs(share - 0.8) < 5 * math.sqrt(0.16 / count)


def test_another_mask_token_is_used_and_reserved() -> None:
    strategy = MlmMasking(MlmConfig(mask_token_id=59, mask_share=1.0, random_share=0.0))
    assert strategy.reserved_ids(100) == (59,)
    masked = strategy.apply(batch(), generator(), evolve(CONTEXT, vocabulary_size=100))
    assert bool((masked.inputs[masked.loss_mask] == 59).all())
    assert MlmMasking().reserved_ids(100) == (99,)


def test_data_with_the_mask_token_is_refused() -> None:
    samples = batch()
    samples.data[2, 7] = 59
    with pytest.raises(DataError) as caught:
        MlmMasking().apply(samples, generator(), CONTEXT)
    assert caught.value.what == (
        f"sample {int(samples.sample_ids[2])}: token id 59 at position 7 is the mask token, and "
        f"the data uses it"
    )
    assert "with_mask_token" in caught.value.hint


def test_a_mask_token_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mask_token_id: 60 is outside the vocabulary of 60 ids"):
        MlmMasking(MlmConfig(mask_token_id=60)).apply(batch(), generator(), CONTEXT)


def test_shares_that_exceed_1_together_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="must be at most 1 - mask_share"):
        make_choice("masking", "mlm", {"mask_share": 0.9, "random_share": 0.2})


# --- mlm


def test_mlm_hides_15_percent() -> None:
    assert hidden_share(MlmMasking()) == 0.15
    assert hidden_share(MlmMasking(MlmConfig(fraction=0.4))) == 0.4


# --- progressive


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.25, 0.5, 0.8, 1.0])
def test_the_schedules_have_their_closed_forms(depth: float) -> None:
    assert progressive_fraction(depth) == pytest.approx(0.15 + 0.75 * depth)
    exponential = (math.e**depth - 1) / (math.e - 1)
    assert progressive_fraction(depth, "exponential") == pytest.approx(0.15 + 0.75 * exponential)
    cosine = (1 - math.cos(math.pi * depth)) / 2
    assert progressive_fraction(depth, "cosine") == pytest.approx(0.15 + 0.75 * cosine)
    assert progressive_fraction(depth, "linear", 0.9, 0.1) == pytest.approx(0.9 - 0.8 * depth)


@pytest.mark.parametrize("schedule", ["linear", "exponential", "cosine"])
def test_progressive_masking_goes_from_15_to_90_percent_over_depth(schedule: Any) -> None:
    strategy = ProgressiveMasking(ProgressiveMaskingConfig(schedule=schedule))
    assert hidden_share(strategy, depth=0.0) == 0.15
    assert hidden_share(strategy, depth=1.0) == 0.90
    expected = math.floor(1000 * progressive_fraction(0.3, schedule) + 1e-9) / 1000
    assert hidden_share(strategy, depth=0.3) == expected


def test_progressive_masking_has_other_masks_at_another_depth() -> None:
    strategy = ProgressiveMasking(ProgressiveMaskingConfig(start=0.5, end=0.5))
    first, second = (
        strategy.apply(batch(), generator(), evolve(CONTEXT, depth=d)).loss_mask for d in (0.2, 0.4)
    )
    assert not torch.equal(first, second)


# --- time_step


def test_each_of_eight_steps_hides_its_share() -> None:
    shares = [hidden_share(TimeStepMasking(), time=(step + 0.5) / 8) for step in range(8)]
    assert shares == [0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85]


def test_shares_may_be_a_mapping_with_gaps() -> None:
    strategy = TimeStepMasking(TimeStepConfig(num_time_steps=5, fractions={0: 0.1, 4: 0.5}))
    shares = [hidden_share(strategy, time=(step + 0.5) / 5) for step in range(5)]
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_step_beyond_the_last_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="must have no step beyond 3"):
        make_choice("masking", "time_step", {"num_time_steps": 4, "fractions": {9: 0.1}})


def test_a_given_time_overrides_the_interpretation() -> None:
    for interpretation in ("depth", "input"):
        strategy = TimeStepMasking(TimeStepConfig(time_interpretation=interpretation))
        assert hidden_share(strategy, time=0.0, depth=1.0) == 0.15


@pytest.mark.parametrize("mapping", ["linear", "exponential"])
def test_depth_replaces_a_missing_time(mapping: Any) -> None:
    strategy = TimeStepMasking(TimeStepConfig(stack_time_mapping=mapping))
    assert hidden_share(strategy, depth=0.0) == 0.15
    assert hidden_share(strategy, depth=1.0) == 0.85
    assert hidden_share(strategy, depth=0.99) == 0.75, "the last step is for the last stack"
    progress = 0.5 if mapping == "linear" else (math.e**0.5 - 1) / (math.e - 1)
    assert hidden_share(strategy, depth=0.5) == pytest.approx(0.15 + 0.1 * math.floor(7 * progress))


def test_depth_and_stack_agree_for_every_depth_of_the_rack() -> None:
    for stacks in (2, 3, 5, 8, 11):
        strategy = TimeStepMasking(guide(max_stacks=stacks))
        for stack in range(stacks):
            by_depth = hidden_share(strategy, depth=stack / (stacks - 1))
            assert by_depth == strategy.fractions[strategy.get_time_step_for_stack(stack)]


def test_time_as_input_is_drawn_from_the_generator_for_each_batch() -> None:
    strategy = TimeStepMasking(TimeStepConfig(time_interpretation="input"))
    draws = generator(1)
    times = [strategy.choose(batch(), draws, CONTEXT)[1] for _ in range(400)]
    assert all(bool((time_B == time_B[0]).all()) for time_B in times)
    counts = torch.bincount(torch.stack(times)[:, 0].mul(8).long(), minlength=8)
    # Uniform over the steps: chi-squared with 7 degrees of freedom, 5 standard deviations above its
    # mean.
    assert float(((counts - 50.0) ** 2 / 50).sum()) < 7 + 5 * math.sqrt(14)
    again = generator(1)
    assert torch.equal(strategy.choose(batch(), again, CONTEXT)[1], times[0])


def test_times_by_sample_are_uniform_and_follow_the_sample() -> None:
    strategy = TimeStepMasking(TimeStepConfig(time_interpretation="input", time_sampling="sample"))
    samples = Batch(torch.zeros(4000, 5, dtype=torch.int64), torch.arange(4000))
    times = strategy.choose(samples, generator(2), CONTEXT)[1]
    counts = torch.bincount(times.mul(8).long(), minlength=8)
    assert float(((counts - 500.0) ** 2 / 500).sum()) < 7 + 5 * math.sqrt(14)
    turned = Batch(samples.data, samples.sample_ids.flip(0))
    assert torch.equal(strategy.choose(turned, generator(2), CONTEXT)[1].flip(0), times)
    assert not torch.equal(strategy.choose(samples, generator(3), CONTEXT)[1], times)


def test_each_row_is_hidden_at_its_time() -> None:
    strategy = TimeStepMasking(TimeStepConfig(time_interpretation="input", time_sampling="sample"))
    samples = batch(40, 100)
    times = strategy.choose(samples, generator(4), CONTEXT)[1]
    counts = strategy.apply(samples, generator(4), CONTEXT).loss_mask.sum(dim=1)
    assert len(set(counts.tolist())) > 3
    assert counts.tolist() == [round(100 * (0.15 + 0.1 * int(time * 8))) for time in times]


@pytest.mark.parametrize("sampling", ["batch", "sample"])
def test_evaluation_does_not_depend_on_how_samples_are_batched(sampling: Any) -> None:
    strategy = TimeStepMasking(TimeStepConfig(time_interpretation="input", time_sampling=sampling))
    samples = batch()
    context = evolve(CONTEXT, training=False)
    whole = strategy.apply(samples, generator(1), context)
    half = strategy.apply(Batch(samples.data[:3], samples.sample_ids[:3]), generator(2), context)
    assert torch.equal(whole.inputs[:3], half.inputs)


# --- as the guide uses it


def guide(**progressive: Any) -> StackWiseConfig:
    config = StackWiseConfig()
    config.model.vocab_size = 60
    for key, value in progressive.items():
        setattr(config.training.progressive, key, value)
    return config


def test_masks_and_time_step_of_a_stack() -> None:
    strategy = TimeStepMasking(guide(max_stacks=8))
    tokens = batch().data[:, :-1]
    masks = strategy.generate_masks_for_stack({"input_ids": tokens}, stack_idx=2)
    assert masks.shape == tokens.shape
    assert masks.sum(dim=1).tolist() == [14] * 6
    assert strategy.get_time_step_for_stack(stack_idx=2) == 2
    assert torch.equal(masks, strategy.generate_masks_for_stack(tokens, stack_idx=2))


def test_masks_of_a_stack_equal_those_of_batches() -> None:
    strategy = TimeStepMasking(guide(max_stacks=8, seed=5))
    samples = batch()
    masks = strategy.generate_masks_for_stack(samples, stack_idx=3)
    applied = strategy.apply(samples, generator(), evolve(CONTEXT, time=3.5 / 8))
    assert torch.equal(masks, applied.loss_mask)


def test_samples_without_ids_are_identified_by_content() -> None:
    strategy = TimeStepMasking(guide())
    tokens = batch().data[:, :-1]
    order = [3, 1, 5, 0, 2, 4]
    masks = strategy.generate_masks_for_stack(tokens, stack_idx=4)
    assert torch.equal(strategy.generate_masks_for_stack(tokens[order], stack_idx=4), masks[order])


def test_every_time_option_of_the_config_has_an_effect() -> None:
    def steps(**options: Any) -> list[int]:
        strategy = TimeStepMasking(guide(**options))
        return [strategy.get_time_step_for_stack(stack) for stack in range(6)]

    assert steps(max_stacks=6) == [0, 1, 2, 4, 5, 7]
    assert steps(max_stacks=11) == [0, 0, 1, 2, 2, 3]
    assert steps(max_stacks=6, num_time_steps=16) == [0, 3, 6, 9, 12, 15]
    assert steps(max_stacks=6, stack_time_mapping="exponential") == [0, 0, 2, 3, 4, 7]
    assert steps(stack_time_mapping="time_per_stack", time_per_stack=3) == [0, 3, 6, 7, 7, 7]
    assert steps(stack_time_mapping="time_per_stack", time_per_stack=100) == [0, 7, 7, 7, 7, 7]
    assert steps(stack_time_mapping="custom", custom_time_mapping=lambda i, n, t: t - 1 - i) == [
        7,
        6,
        5,
        4,
        3,
        2,
    ]
    shares = TimeStepMasking(guide(time_step_fractions={0: 0.0, 7: 0.7})).fractions
    assert shares == pytest.approx([0.1 * step for step in range(8)])
    assert TimeStepMasking(guide(mask_token_id=4)).reserved_ids(60) == (4,)


def test_a_custom_mapping_gets_max_stacks() -> None:
    given: list[tuple[int, int, int]] = []

    def custom(stack_idx: int, max_stacks: int, num_time_steps: int) -> int:
        given.append((stack_idx, max_stacks, num_time_steps))
        return stack_idx

    config = guide()
    progressive = config.training.progressive
    progressive.max_stacks = 9
    progressive.num_time_steps = 8
    progressive.stack_time_mapping = "custom"
    progressive.custom_time_mapping = custom
    assert progressive.time_step(1, 4) == 1
    assert TimeStepMasking(config).get_time_step_for_stack(2) == 2
    assert given == [(1, 9, 8), (2, 9, 8)]


def test_an_unknown_stack_has_no_time_step() -> None:
    with pytest.raises(UsageProblem, match="a rack of 4 stacks has no stack 4"):
        TimeStepMasking(guide(max_stacks=4)).get_time_step_for_stack(4)


def test_time_as_input_is_drawn_by_seed_for_a_stacks_masks() -> None:
    tokens = batch().data[:, :-1]
    counts = set()
    for seed in range(40):
        strategy = TimeStepMasking(guide(time_interpretation="input", seed=seed))
        masks = strategy.generate_masks_for_stack(tokens, stack_idx=0)
        assert torch.equal(masks, strategy.generate_masks_for_stack(tokens, stack_idx=0))
        counts.add(int(masks[0].sum()))
    assert len(counts) > 4
