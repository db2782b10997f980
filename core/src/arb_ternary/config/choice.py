"""A component that a config names, with its options: ``{name: adamw, lr: 0.001}`` in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

from attrs import evolve, frozen

from arb_ternary.specs import (
    DataSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    Spec,
    keeping_default_dtype,
    load_target,
)

S = TypeVar("S", bound=Spec)


@frozen
class Choice(Generic[S]):
    """A component that was found in the registry, and its options.

    ``Choice[OptimizerSpec]`` is the type of a field that names an optimizer, and a class of its
    own. A config class may have fields of such a type, or lists of it. Components nest to any
    depth.

    Attributes:
        kind: class attribute: the kind of component.
        noun: class attribute: the noun for the kind in messages.
        name: the name of the component.
        options: an instance of the spec's config class; None for a component without options.
        given: the options that the user wrote; the others have their defaults.
        spec: what is registered under the name.
    """

    kind: ClassVar[str] = "component"
    noun: ClassVar[str] = "component"

    name: str
    options: Any
    given: frozenset[str]
    spec: S

    def __class_getitem__(cls, spec: Any) -> Any:
        if isinstance(spec, type) and issubclass(spec, Spec):
            return choice_of(spec)
        return cls

    def with_option(self, path: Sequence[int | str], value: Any) -> Self:
        """Return a copy with another value of the option at ``path``, through components inside."""
        name = str(path[0])
        if len(path) > 1:
            value = getattr(self.options, name).with_option(path[1:], value)
        return evolve(self, options=evolve(self.options, **{name: value}))

    def build(self, *args: Any) -> Any:
        """Call the factory as ``factory(options, *args)``.

        Raises:
            EnvironmentProblem, ComponentError: the factory cannot be imported, or does not exist,
                or changes torch's default dtype.
        """
        what = f"{self.kind} '{self.name}':"
        factory = load_target(what, self.spec.target)
        with keeping_default_dtype(f"{what} {self.spec.target}"):
            return factory(self.options, *args)


_classes: dict[type, type[Choice[Any]]] = {}


def choice_of(spec: type[Spec]) -> type[Choice[Any]]:
    """Return ``Choice[spec]``, for a kind that is known at run time only."""
    if spec not in _classes:
        name = f"{spec.__name__.removesuffix('Spec')}Choice"
        facts = {"kind": spec.kind, "noun": spec.noun, "__module__": __name__, "__slots__": ()}
        _classes[spec] = type(name, (Choice,), facts)
    return _classes[spec]


DataChoice = Choice[DataSpec]
MaskingChoice = Choice[MaskingSpec]
ModelChoice = Choice[ModelSpec]
OptimizerChoice = Choice[OptimizerSpec]
PhaseChoice = Choice[PhaseSpec]
