"""The time step of each stack, and the share of hidden positions at each step."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_progressive.config import GrowthConfig
from arb_ternary_progressive.time import (
    check_fractions,
    denoising_fractions,
    depth_of,
    discrete_time,
    step_fractions,
    step_of_time,
    time_of_step,
    time_step_for_stack,
)

GROWTH = GrowthConfig()


def late(stack_idx: int, max_stacks: int, num_time_steps: int) -> int:
    """Assign the last steps, one per stack."""
    return num_time_steps - max_stacks + stack_idx


@given(st.integers(2, 40), st.integers(1, 40))
def test_linear_reaches_the_last_step_at_the_last_stack_only(stacks: int, steps: int) -> None:
    found = [
        time_step_for_stack(i, final_depth=stacks, num_time_steps=steps) for i in range(stacks)
    ]
    assert found[0] == 0
    assert found[-1] == steps - 1
    assert steps == 1 or all(step < steps - 1 for step in found[:-1])


@given(st.integers(2, 40), st.integers(1, 40))
def test_the_linear_mapping_is_the_floor_of_even_spacing(stacks: int, steps: int) -> None:
    for i in range(stacks):
        expected = math.floor(Fraction(i * (steps - 1), stacks - 1))
        assert time_step_for_stack(i, final_depth=stacks, num_time_steps=steps) == expected


def test_the_linear_mapping_of_eight_stacks_is_a_step_a_stack() -> None:
    assert [time_step_for_stack(i, final_depth=8, num_time_steps=8) for i in range(8)] == list(
        range(8)
    )


def test_the_exponential_mapping_has_its_closed_form() -> None:
    steps = 1000
    found = [
        time_step_for_stack(i, final_depth=5, num_time_steps=steps, mapping="exponential")
        for i in range(5)
    ]
    expected = [math.floor((math.e ** (i / 4) - 1) / (math.e - 1) * 999 + 1e-6) for i in range(5)]
    assert found == expected
    assert found == [0, 165, 377, 649, 999]


def test_time_per_stack_counts_steps_and_stays_at_the_last() -> None:
    found = [
        time_step_for_stack(
            i, final_depth=6, num_time_steps=8, mapping="time_per_stack", time_per_stack=2
        )
        for i in range(6)
    ]
    assert found == [0, 2, 4, 6, 7, 7]


@pytest.mark.parametrize("mapping", ["linear", "exponential"])
def test_a_single_stack_is_the_last_one(mapping: str) -> None:
    assert time_step_for_stack(0, final_depth=1, num_time_steps=8, mapping=mapping) == 7
    assert depth_of(0, 1) == 1.0


def test_a_custom_mapping_is_a_function_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for custom in (late, f"{__name__}:late"):
        monkeypatch.setitem(sys.modules, __name__, sys.modules[late.__module__])
        found = [
            time_step_for_stack(i, final_depth=3, num_time_steps=8, mapping="custom", custom=custom)
            for i in range(3)
        ]
        assert found == [5, 6, 7]


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (None, "custom_time_mapping: the mapping is custom, and no function is given"),
        (
            "no_such_module_here:f",
            "custom_time_mapping: 'no_such_module_here:f' cannot be imported",
        ),
        (
            "math:no_such_function",
            "custom_time_mapping: 'math:no_such_function' cannot be imported",
        ),
        ("math:pi", "custom_time_mapping: 'math:pi' is not a function"),
        (
            lambda i, n, t: t,
            "custom_time_mapping: for stack 1 of 3 it returns 8, which is not a time step",
        ),
        (lambda i, n, t: i / n, "custom_time_mapping: for stack 1 of 3 it returns 0.33"),
    ],
)
def test_an_unusable_custom_mapping_is_an_error(custom: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        time_step_for_stack(1, final_depth=3, num_time_steps=8, mapping="custom", custom=custom)
    assert caught.value.what.startswith(message)


@pytest.mark.parametrize("stack", [-1, 3])
def test_a_stack_outside_the_rack_is_an_error(stack: int) -> None:
    with pytest.raises(UsageProblem, match=f"a rack of 3 stacks has no stack {stack}"):
        time_step_for_stack(stack, final_depth=3, num_time_steps=8)
    with pytest.raises(UsageProblem):
        depth_of(stack, 3)


def test_depth_runs_from_0_to_1() -> None:
    assert [depth_of(i, 5) for i in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


@given(st.integers(1, 64), st.data())
def test_the_middle_of_a_step_lies_in_it(steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps - 1))
    assert step_of_time(time_of_step(step, steps), steps) == step
    time = data.draw(st.floats(0, 1))
    assert discrete_time(time, steps) == time_of_step(step_of_time(time, steps), steps)


def test_the_end_of_time_is_in_the_last_step() -> None:
    assert step_of_time(1.0, 8) == 7
    assert step_of_time(0.0, 8) == 0
    assert [step_of_time(i / 8, 8) for i in range(8)] == list(range(8))


@pytest.mark.parametrize("time", [-0.01, 1.01, math.nan])
def test_a_time_outside_its_range_is_an_error(time: float) -> None:
    with pytest.raises(UsageProblem, match="time: must be between 0 and 1"):
        step_of_time(time, 8)


def test_eight_steps_have_the_shares_15_to_85() -> None:
    assert step_fractions(None, 8) == (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)


def test_the_default_spreads_over_another_number_of_steps() -> None:
    assert step_fractions(None, 15) == pytest.approx([0.15 + 0.05 * i for i in range(15)])
    assert step_fractions(None, 1) == (0.15,)


def test_a_list_of_two_is_a_line() -> None:
    assert step_fractions([0.0, 1.0], 5) == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_a_list_with_one_share_per_step_is_used_unchanged() -> None:
    assert step_fractions([0.9, 0.1, 0.5], 3) == (0.9, 0.1, 0.5)


def test_a_mapping_is_interpolated_and_constant_beyond_its_ends() -> None:
    assert step_fractions({4: 0.8, 2: 0.2}, 7) == pytest.approx([0.2, 0.2, 0.2, 0.5, 0.8, 0.8, 0.8])


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ([], "must have at least one share"),
        ([0.1, 1.2], "must be shares between 0 and 1, not 1.2"),
        ([True], "must be shares between 0 and 1, not True"),
        ({-1: 0.2}, "must have whole numbers from 0 for steps, not -1"),
        ({8: 0.2}, "must have no step beyond 7"),
    ],
)
def test_invalid_shares_are_errors(fractions: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fractions(fractions, 8)


def test_the_denoising_schedule_falls_to_nothing_hidden() -> None:
    assert denoising_fractions(GROWTH, 8) == (
        0.85,
        0.75,
        0.65,
        0.55,
        0.45,
        0.35,
        0.25,
        0.15,
        0.0,
    )
    assert denoising_fractions(GROWTH, 2) == (0.85, 0.15, 0.0)
    assert denoising_fractions(GROWTH, 1) == (0.85, 0.0)


def test_the_denoising_schedule_is_that_of_training_in_reverse() -> None:
    trained = [
        step_fractions(None, 8)[time_step_for_stack(i, final_depth=5, num_time_steps=8)]
        for i in range(5)
    ]
    assert denoising_fractions(GROWTH, 5) == (*reversed(trained), 0.0)


def test_an_increasing_denoising_schedule_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"grows from 0.1 to 0.9 between stacks 0 and 1"):
        denoising_fractions(GROWTH, 2, fractions=[0.9, 0.1])
