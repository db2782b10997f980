"""Options that declare when they take effect."""

from __future__ import annotations

from types import SimpleNamespace

from attrs import frozen

from arb_ternary.config.fields import unused_options
from arb_ternary.config.options import Condition, option, trains, unless, when


@frozen(kw_only=True)
class Amp:
    use_amp: bool = option(False, "run under autocast")
    amp_dtype: str = option("bfloat16", "number format", active_when=when("use_amp"))
    schedule: str = option("cosine", "how rates fall")
    min_rate: float = option(
        0.05, "rate at the end", active_when=unless("schedule", "constant", "none")
    )
    lr: float = option(
        0.1,
        "rate of float parameters",
        active_when=[
            trains("float", reason="the model has no float parameters"),
            Condition(lambda options, run, plan: run != "idle", "the run trains nothing"),
        ],
    )


def unused(options: Amp, run: object = None, *kinds: str) -> list[tuple[str, str]]:
    plan = SimpleNamespace(kinds=frozenset(kinds)) if kinds else None
    return list(unused_options(options, run, plan))


def test_an_option_at_its_default_is_never_unused() -> None:
    assert unused(Amp()) == []
    assert unused(Amp(schedule="none"), "idle", "ternary") == []


def test_a_set_option_whose_sibling_disables_it_is_unused() -> None:
    assert unused(Amp(amp_dtype="float16")) == [
        ("amp_dtype", "has no effect because 'use_amp' is false; remove it")
    ]
    assert unused(Amp(amp_dtype="float16", use_amp=True)) == []
    assert unused(Amp(min_rate=0.5, schedule="constant")) == [
        ("min_rate", "has no effect because 'schedule' is constant; remove it")
    ]


def test_conditions_see_the_run_and_what_it_trains() -> None:
    assert unused(Amp(lr=0.2)) == []
    assert unused(Amp(lr=0.2), None, "float", "ternary") == []
    assert unused(Amp(lr=0.2), None, "ternary") == [
        ("lr", "has no effect because the model has no float parameters; remove it")
    ]
    assert unused(Amp(lr=0.2), "idle", "float") == [
        ("lr", "has no effect because the run trains nothing; remove it")
    ]


def test_only_the_first_reason_is_given() -> None:
    assert len(unused(Amp(lr=0.2), "idle", "ternary")) == 1
