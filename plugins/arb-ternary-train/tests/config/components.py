"""Components and registry for tests of a run's config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import (
    CheckSpec,
    DataSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    PolicySpec,
    Spec,
)

MODULE = "arb_run_test_components"


@frozen(kw_only=True)
class Adam:
    lr: float = option(1e-3, "learning rate", validator=positive)
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the moments")


@frozen(kw_only=True)
class Decoder:
    width: int = option(64, "features", validator=positive)
    group_size: Literal[32, 64, "row"] = option(32, "group size")
    activations: Literal["int8", "float"] = option("float", "activations")
    gradients: Literal["int8", "float"] = option("float", "gradients")

    def __attrs_post_init__(self) -> None:
        if self.activations == "int8" and self.width % 32:
            raise ValueError("'width' must be a multiple of 32 for int8")


@frozen(kw_only=True)
class Standard:
    steps: int = option(help="optimizer steps", validator=positive)
    lr: float | None = option(
        None, "learning rate; null = the optimizer's", validator=optional(positive)
    )


@frozen(kw_only=True)
class Watched(Standard):
    hawk: int = option(1, "an option with the name of a policy")
    policy: Choice[PolicySpec] | None = option(None, "what decides; null = nothing")


@frozen(kw_only=True)
class Insured(Standard):
    policy: str = option("life", "a policy of another kind")


@frozen(kw_only=True)
class Watch:
    every: int = option(10, "steps between looks", validator=positive)
    names: tuple[str, ...] = option((), "who looks")


@frozen
class Registered:
    spec: Spec


def _spec(cls: type[Spec], name: str, config: str | None = None, **more: Any) -> Spec:
    return cls(name=name, target=f"{MODULE}:{name}", config=config and f"{MODULE}:{config}", **more)


SPECS = (
    _spec(OptimizerSpec, "adam", "Adam", accepts=frozenset({"float"})),
    _spec(ModelSpec, "decoder", "Decoder"),
    _spec(ModelSpec, "bare"),
    _spec(DataSpec, "shakespeare"),
    _spec(MaskingSpec, "causal"),
    _spec(PhaseSpec, "standard", "Standard"),
    _spec(PhaseSpec, "watched", "Watched"),
    _spec(PhaseSpec, "insured", "Insured"),
    _spec(PolicySpec, "watch", "Watch"),
    _spec(PolicySpec, "sleep"),
    _spec(PolicySpec, "hawk"),
    _spec(CheckSpec, "pure"),
)


class FakeRegistry:
    """A stand-in for the registry; names that begin with ``absent`` are not installed."""

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

    def names(self, kind: str) -> Sequence[str]:
        return tuple(sorted(name for each, name in self.specs if each == kind))

    def not_installed(self, kind: str) -> dict[str, str]:
        return {"absent": "arb-ternary-absent"} if kind == "policy" else {}


class FakePlugins:
    """A stand-in for the plugin manager; it records the files that it was asked to load."""

    def __init__(self) -> None:
        self.registry = FakeRegistry()
        self.files: list[Path] = []

    def load_file(self, path: Path) -> None:
        if "broken" in path.name:
            raise EnvironmentProblem(f"plugin file {path.name}: failed")
        if not path.is_file():
            raise UsageProblem(f"plugin file {path.name}: no such file")
        self.files.append(path)
