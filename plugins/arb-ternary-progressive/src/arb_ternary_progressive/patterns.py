"""How rank and alpha of adapters go from stack to stack."""

from __future__ import annotations

from arb_ternary.errors import ConfigError
from arb_ternary_progressive.growth_config import GrowthConfig, Pattern

#: What ``linear`` adds a stack.
LINEAR_STEP = 8


def pattern_value(base: float, pattern: Pattern, stack: int) -> float:
    """The value of stack ``stack`` (0, 1, ...): ``base``, ``base 2^i``, ``base // 2^i`` (at least
    1), ``base + 8 i``.

    Whole numbers stay whole.
    """
    if pattern == "increasing":
        return base * (1 << stack)
    if pattern == "decreasing":
        return max(base // (1 << stack), 1)
    if pattern == "linear":
        return base + LINEAR_STEP * stack
    return base


def stack_rank_and_alpha(config: GrowthConfig, stack: int) -> tuple[int, float]:
    """Rank and alpha of the adapter that stack ``stack``, in the order of building, gets when it is
    made.

    Raises:
        ConfigError: the strategy is ``variable`` and the stack has no entry.
    """
    if config.qlora_strategy == "simplified":
        return config.qlora_rank, config.qlora_alpha
    if config.qlora_strategy == "progressive":
        rank = pattern_value(config.qlora_rank, config.qlora_rank_pattern, stack)
        return int(rank), pattern_value(config.qlora_alpha, config.qlora_alpha_pattern, stack)
    entry = (config.qlora_configs or {}).get(stack)
    if entry is None:
        raise ConfigError(
            f"qlora_configs: there is no entry for stack {stack}",
            "With qlora_strategy variable every stack has its own rank and alpha.",
        )
    return entry.rank, entry.alpha
