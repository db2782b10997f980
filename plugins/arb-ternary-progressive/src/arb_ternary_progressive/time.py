"""Time: the time step that each stack is trained at, and the share of tokens hidden at each step.

Time runs from 0 to 1 and is cut into ``T`` steps of equal length; step 0 hides the least. As an
*input* it is drawn anew for every batch; as *depth* it belongs to a stack. Stacks are counted in
the order in which they are built, from 0, also if they are prepended. Noise grows with the order of
building, so the first stack of a prepended rack, which is the newest, gets the heaviest noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary.specs import resolve

if TYPE_CHECKING:
    from arb_ternary_progressive.config import GrowthConfig

#: How a stack gets its time step.
TimeMapping: TypeAlias = Literal["linear", "exponential", "custom", "time_per_stack"]
#: ``f(stack_idx, max_stacks, num_time_steps)``: the time step of a stack.
CustomMapping: TypeAlias = Callable[[int, int, int], int]
#: Shares of hidden positions: evenly over the steps, or at the steps that a mapping names.
Fractions: TypeAlias = Sequence[float] | Mapping[int, float]

#: The share of hidden positions at each of eight steps.
DEFAULT_FRACTIONS: Final = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)

#: Added before rounding down, because floating point may end slightly below a whole number.
_SLACK: Final = 1e-9


def exponential(progress: float) -> float:
    """Return ``(e**p - 1) / (e - 1)``: from 0 at 0 to 1 at 1, slow at first."""
    return math.expm1(progress) / math.expm1(1.0)


def time_of_step(step: int, num_time_steps: int) -> float:
    """Return the middle of a time step, ``(step + 1/2) / T``, which represents the step."""
    return (step + 0.5) / num_time_steps


def step_of_time(time: float, num_time_steps: int) -> int:
    """Return the step that ``time`` in [0, 1] lies in, ``min(floor(time T), T - 1)``.

    Raises:
        UsageProblem: ``time`` is not in [0, 1].
    """
    if not 0.0 <= time <= 1.0:
        raise UsageProblem(f"time: must be between 0 and 1, not {time}")
    return min(int(time * num_time_steps), num_time_steps - 1)


def discrete_time(time: float, num_time_steps: int) -> float:
    """Return the middle of the step that ``time`` lies in: one of ``T`` values.

    Raises:
        UsageProblem: ``time`` is not in [0, 1].
    """
    return time_of_step(step_of_time(time, num_time_steps), num_time_steps)


def depth_of(stack_idx: int, final_depth: int) -> float:
    """Return how far a rack has grown when a stack is trained: 0 with the first, 1 with the last.

    Raises:
        UsageProblem: there is no such stack.
    """
    _check_stack(stack_idx, final_depth)
    return stack_idx / (final_depth - 1) if final_depth > 1 else 1.0


def time_step_for_stack(
    stack_idx: int,
    *,
    final_depth: int,
    num_time_steps: int,
    mapping: TimeMapping = "linear",
    custom: CustomMapping | str | None = None,
    time_per_stack: int = 100,
    max_stacks: int | None = None,
) -> int:
    """Return the time step, 0 to ``T - 1``, that a stack is trained at.

    ``linear``: ``floor(i (T - 1) / (N - 1))``, evenly over all steps; the last step belongs to the
    last stack alone. ``exponential``: ``floor((e**p - 1) / (e - 1) (T - 1))`` with ``p = i / (N -
    1)``. ``time_per_stack``: a fixed number of steps per stack, ``min(i time_per_stack, T - 1)``.
    ``custom``: the result of a function. A single stack counts as the last one.

    Args:
        stack_idx: ``i``, in the order of building.
        final_depth: ``N``, stacks of the finished rack.
        num_time_steps: ``T``.
        mapping: one of the four.
        custom: the function of ``custom``, or its name as ``module:function``.
        time_per_stack: steps per stack of ``time_per_stack``.
        max_stacks: the most stacks that a rack may have, for the function of ``custom``; None =
            ``final_depth``.

    Raises:
        UsageProblem: there is no such stack.
        ConfigError: the function is missing or returns no time step.
    """
    _check_stack(stack_idx, final_depth)
    last = num_time_steps - 1
    if mapping == "custom":
        return _custom_step(stack_idx, max_stacks or final_depth, num_time_steps, custom)
    if mapping == "time_per_stack":
        return min(stack_idx * time_per_stack, last)
    if final_depth == 1:
        return last
    if mapping == "linear":
        return stack_idx * last // (final_depth - 1)
    return math.floor(exponential(depth_of(stack_idx, final_depth)) * last + _SLACK)


def _custom_step(
    stack_idx: int, max_stacks: int, num_time_steps: int, custom: CustomMapping | str | None
) -> int:
    step = resolve_mapping(custom)(stack_idx, max_stacks, num_time_steps)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < num_time_steps:
        raise ConfigError(
            f"custom_time_mapping: for stack {stack_idx} of {max_stacks} it returns {step!r}, "
            "which is not a time step",
            f"Time steps are whole numbers from 0 to {num_time_steps - 1}.",
        )
    return step


def resolve_mapping(custom: CustomMapping | str | None) -> CustomMapping:
    """Return the function of the mapping ``custom``.

    Raises:
        ConfigError: it is not given, cannot be imported or cannot be called.
    """
    if custom is None:
        raise ConfigError(
            "custom_time_mapping: the mapping is custom, and no function is given",
            "Name one as module:function; it is called as f(stack_idx, max_stacks, "
            "num_time_steps).",
        )
    function: CustomMapping
    if isinstance(custom, str):
        try:
            function = resolve(custom)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"custom_time_mapping: {custom!r} cannot be imported: {error}",
                "Write module:function, with the module on the Python path.",
            ) from error
    else:
        function = custom
    if not callable(function):
        raise ConfigError(f"custom_time_mapping: {custom!r} is not a function")
    return function


def check_fractions(fractions: Fractions | None, num_time_steps: int | None = None) -> None:
    """Check that shares of hidden positions can be used.

    Raises:
        ValueError: there are none, one is not in [0, 1], or a step is outside ``0 .. T - 1``.
    """
    if fractions is None:
        return
    named = dict(fractions) if isinstance(fractions, Mapping) else dict(enumerate(fractions))
    if not named:
        raise ValueError("must have at least one share of hidden positions")
    for step, share in named.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"must be shares between 0 and 1, not {share!r} (step {step!r})")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"must have whole numbers from 0 for steps, not {step!r}")
        if isinstance(fractions, Mapping) and num_time_steps is not None and step >= num_time_steps:
            raise ValueError(
                f"must have no step beyond {num_time_steps - 1}, the last of {num_time_steps}; "
                f"{step} is"
            )


def step_fractions(fractions: Fractions | None, num_time_steps: int) -> tuple[float, ...]:
    """Return the share of hidden positions at each of ``T`` steps.

    A list is spread evenly over the steps, from its first value at the first step to its last at
    the last: with ``T`` values it has one for each; a single step has the first. A mapping names
    steps. Between two values shares are interpolated linearly; before the first and after the last
    they are constant. None is ``DEFAULT_FRACTIONS``.

    Raises:
        ValueError: see :func:`check_fractions`.
    """
    fractions = DEFAULT_FRACTIONS if fractions is None else fractions
    check_fractions(fractions, num_time_steps)
    places: Sequence[float]
    values: Sequence[float]
    if isinstance(fractions, Mapping):
        places, values = zip(*sorted(fractions.items()), strict=True)
    else:
        values = fractions[:1] if num_time_steps == 1 else fractions
        # Whole numbers, so that a list of T values is not interpolated.
        places = range(num_time_steps)
        if len(values) != num_time_steps:
            places = np.linspace(0, num_time_steps - 1, len(values)).tolist()
    return tuple(float(share) for share in np.interp(range(num_time_steps), places, values))


def denoising_fractions(
    growth: GrowthConfig, stacks: int, fractions: Fractions | None = None
) -> tuple[float, ...]:
    """Return the deterministic schedule ``r_0 .. r_K`` of a rack that was built right to left.

    ``r_k`` is the share of positions that is still hidden when the ``k``-th stack to run begins:
    the share that this stack was trained at, built as number ``K - 1 - k``. ``r_K`` is 0: nothing
    is hidden after the last stack.

    Args:
        growth: how stacks get their time steps.
        stacks: ``K``, stacks of the finished rack.
        fractions: share of hidden positions at each step; None = the default.

    Raises:
        ConfigError: a share is larger than the one before it.
    """
    per_step = step_fractions(fractions, growth.num_time_steps)
    shares = [per_step[growth.time_step(stack, stacks)] for stack in reversed(range(stacks))]
    schedule = (*shares, 0.0)
    for place, (before, after) in enumerate(pairwise(schedule)):
        if after > before:
            raise ConfigError(
                f"time: the share of hidden positions grows from {before} to {after} between "
                f"stacks {place} and {place + 1} in the order in which they run",
                "Let shares grow with the step and steps with the stack; stacks run in reverse "
                "order of building.",
            )
    return schedule


def _check_stack(stack_idx: int, final_depth: int) -> None:
    if not 0 <= stack_idx < final_depth:
        raise UsageProblem(
            f"stack_idx: a rack of {final_depth} stacks has no stack {stack_idx}",
            f"Stacks are counted from 0 to {final_depth - 1}.",
        )
