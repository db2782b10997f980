"""Components for tests of configs: a registry and config classes of every supported shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
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
from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import DataSpec, MaskingSpec, ModelSpec, OptimizerSpec, PhaseSpec, Spec

MODULE = "arb_config_test_components"


@frozen(kw_only=True)
class RuleSpec(Spec):
    """A kind of component of another distribution."""

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


def _is_after_start(instance: Span, attribute: Any, value: int) -> None:
    if value == 14:
        raise RuntimeError("broken")
    if value < instance.start:
        raise ValueError(f"'end' must not be before 'start', which is {instance.start}")


def _sorted(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(values))


@frozen(kw_only=True)
class Span:
    start: int = option(help="first", validator=non_negative)
    end: int = option(help="last", validator=_is_after_start)
    steps: tuple[int, ...] = option(
        (),
        "in between",
        validator=Rule(
            "numbers from 0, in order", lambda values: values == tuple(sorted(map(abs, values))), {}
        ),
        converter=_sorted,
    )


@frozen(kw_only=True)
class Everything:
    """One option of every type."""

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
class Reserved:
    name: str = option("x", "clashes with the component's name")


@frozen(kw_only=True)
class Unresolvable:
    value: Missing = field(default=None)  # type: ignore[name-defined]  # noqa: F821


@frozen(kw_only=True)
class OddType:
    value: set[int] = option(help="a type that options cannot have", factory=set)


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


#: Settings of a starter config.
SETTINGS = {
    "data": "letters",
    "model": {"name": "stack", "width": 32},
    "optimizer": {"name": "wrapper", "inner": {"name": "adam", "lr": 0.5}},
    "phases": [{"name": "standard", "steps": 7}, {"name": "standard", "steps": 8}],
    "rules": ["pure"],
    "saving": {"every": 5},
}


@frozen
class Registered:
    spec: Spec


def build_adam(options: Adam, trainable: Any) -> tuple[Adam, Any]:
    return options, trainable


def _spec(cls: type[Spec], name: str, config: str | None, **more: Any) -> Spec:
    path = None if config is None else config if ":" in config else f"{MODULE}:{config}"
    return cls(name=name, target=f"{MODULE}:build_adam", config=path, summary=f"the {name}", **more)


_FLOAT = {"accepts": frozenset({"float"})}

SPECS = (
    _spec(OptimizerSpec, "adam", "Adam", **_FLOAT),
    _spec(OptimizerSpec, "sgd", None, **_FLOAT),
    _spec(OptimizerSpec, "wrapper", "Wrapper", **_FLOAT),
    _spec(OptimizerSpec, "reserved", "Reserved", **_FLOAT),
    _spec(OptimizerSpec, "unresolvable", "Unresolvable", **_FLOAT),
    _spec(OptimizerSpec, "odd_type", "OddType", **_FLOAT),
    _spec(OptimizerSpec, "lost", "no_such_module:Config", **_FLOAT),
    _spec(OptimizerSpec, "no_class", "Nothing", **_FLOAT),
    _spec(OptimizerSpec, "not_attrs", "build_adam", **_FLOAT),
    _spec(ModelSpec, "stack", "Stack"),
    _spec(ModelSpec, "everything", "Everything"),
    _spec(ModelSpec, "bare", None),
    _spec(DataSpec, "letters", None),
    _spec(MaskingSpec, "shift", None),
    _spec(PhaseSpec, "standard", "Standard"),
    _spec(RuleSpec, "pure", None),
)


class FakeRegistry:
    """A registry with the specs above; a name that begins with ``absent`` is not installed."""

    def __init__(self, specs: Sequence[Spec] = SPECS) -> None:
        self.specs = {(spec.kind, spec.name): spec for spec in specs}

    def get(self, kind: str, name: str) -> Registered:
        if name.startswith("absent"):
            raise EnvironmentProblem(
                f"{kind} '{name}' is not installed", f"pip install arb-ternary-{name}"
            )
        if (kind, name) not in self.specs:
            close = nearest(name, self.names(kind))
            raise UsageProblem(
                f"no {kind} is called '{name}'" + (f"; did you mean '{close}'?" if close else ""),
                f"available: {', '.join(self.names(kind))}",
            )
        return Registered(self.specs[kind, name])

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(sorted(name for each, name in self.specs if each == kind))
