"""A kind of config file with options of every supported type, for tests of its schema and of
starter configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from attrs.validators import ge, in_

from arb_ternary.config.choice import (
    Choice,
    DataChoice,
    MaskingChoice,
    ModelChoice,
    OptimizerChoice,
    PhaseChoice,
)
from arb_ternary.config.options import (
    Rule,
    default_choice,
    fraction,
    non_negative,
    one_of,
    option,
    optional,
    positive,
)
from arb_ternary.specs import DataSpec, MaskingSpec, ModelSpec, OptimizerSpec, PhaseSpec, Spec

MODULE = "arb_study_test_components"


@frozen(kw_only=True)
class RuleSpec(Spec):
    """A kind of component that is not the core's."""

    kind = "rule"
    hook = "arb_register_rules"
    noun = "rule"


@frozen(kw_only=True)
class Adam:
    lr: float = option(1e-3, "learning rate", validator=positive)
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the moments")
    mode: Literal["plain", "amsgrad"] = option("plain", "which Adam")


@frozen(kw_only=True)
class Wrapper:
    inner: OptimizerChoice = default_choice("adam", "what is wrapped")
    others: tuple[OptimizerChoice, ...] = option((), "more of them")
    limits: dict[int, float] = option(help="limit by step", factory=dict)


@frozen(kw_only=True)
class Stack:
    width: int = option(64, "features", validator=positive)
    heads: int = option(4, "heads", validator=positive)
    group_size: Literal[32, 64, "row"] = option(32, "group size")
    activations: Literal["int8", "float"] = option("float", "activations")
    gradients: Literal["int8", "float"] = option("float", "gradients")

    def __attrs_post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"'width' must be a multiple of 'heads'; {self.width} is not a multiple of "
                f"{self.heads}"
            )


@frozen(kw_only=True)
class Standard:
    steps: int = option(help="optimizer steps", validator=positive)
    lr: float | None = option(
        None, "learning rate; null = the optimizer's", validator=optional(positive)
    )
    share: float = option(0.5, "a share", validator=fraction)
    every: int = option(0, "a cadence", validator=[non_negative, ge(0)])


@frozen(kw_only=True)
class Inner:
    size: int = option(1, "a size", validator=in_((1, 2, 4)))
    _weight: float = option(0.5, "a private attribute, given without its underscore")


@frozen(kw_only=True)
class Everything:
    """Every type of option."""

    text: str = option("a", "text")
    flag: bool = option(False, "a flag")
    count: int = option(1, "a count")
    number: float = option(1.0, "a number")
    path: Path = option(Path("x"), "a path")
    window: int | Literal["all"] = option("all", "a number or a word")
    either: float | int | None = option(None, "a number of either kind")
    words: list[str] = option(help="words", factory=list)
    names: Sequence[str] = option((), "names")
    ranks: Mapping[str, int] = option(help="ranks by name", factory=dict)
    nested: Inner = option(help="a nested class", factory=Inner)
    maybe: Inner | None = option(None, "a nested class or nothing")
    table: dict[str, Inner] = option(help="nested classes by name", factory=dict)
    rows: tuple[Inner, ...] = option((), "a list of nested classes")
    shape: str | Inner = option("square", "a word or a nested class")
    level: int = option(1, "a level", validator=one_of(1, 2, 3))
    anything: Any = option(None, "anything")


@frozen(kw_only=True)
class Saving:
    every: int = option(
        200,
        "steps between two files; 0 = only at the end, when everything that was asked for has run",
        validator=non_negative,
    )
    keep: int = option(3, "how many stay", validator=positive)


@frozen(kw_only=True)
class Study:
    """The top level of a file."""

    name: str = option(
        "study",
        "what it is called",
        validator=Rule("short", lambda value: len(value) < 9, {"maxLength": 8}),
    )
    seed: int = option(0, "seed of all randomness", validator=non_negative)
    data: DataChoice = option(help="where it comes from")
    model: ModelChoice = option(help="the network")
    masking: MaskingChoice = default_choice("shift", "what is hidden")
    optimizer: OptimizerChoice = option(help="how the model learns")
    phases: tuple[PhaseChoice, ...] = option(
        help="what is done, in order",
        validator=Rule("a list of at least one item", bool, {"minItems": 1}),
    )
    rules: tuple[Choice[RuleSpec], ...] = option((), "what must hold")
    saving: Saving = option(help="when files are written", factory=Saving)


SETTINGS = {
    "data": "letters",
    "model": {"name": "stack", "width": 32},
    "optimizer": {"name": "wrapper", "inner": {"name": "adam", "lr": 0.5}},
    "phases": [{"name": "standard", "steps": 7}, {"name": "standard", "steps": 8}],
    "rules": ["pure"],
    "saving": {"every": 5},
}


def _spec(cls: type[Spec], name: str, config: str | None = None, **more: Any) -> Spec:
    path = config if config is None or ":" in config else f"{MODULE}:{config}"
    return cls(name=name, target=f"{MODULE}:build", config=path, summary=f"the {name}", **more)


_FLOAT = {"accepts": frozenset({"float"})}

SPECS = (
    _spec(OptimizerSpec, "adam", "Adam", **_FLOAT),
    _spec(OptimizerSpec, "sgd", **_FLOAT),
    _spec(OptimizerSpec, "wrapper", "Wrapper", **_FLOAT),
    _spec(OptimizerSpec, "lost", "no_such_module:Config", **_FLOAT),
    _spec(ModelSpec, "stack", "Stack"),
    _spec(ModelSpec, "everything", "Everything"),
    _spec(ModelSpec, "bare"),
    _spec(DataSpec, "letters"),
    _spec(MaskingSpec, "shift"),
    _spec(PhaseSpec, "standard", "Standard"),
    _spec(RuleSpec, "pure"),
)
