"""A component that a config names, with its options: ``{name: adamw, lr: 0.001}`` in a file."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

from arb_ternary.errors import ComponentError, EnvironmentProblem
from arb_ternary.specs import Spec, resolve

__all__ = [
    "CheckChoice",
    "Choice",
    "DataChoice",
    "ExporterChoice",
    "MaskingChoice",
    "ModelChoice",
    "OptimizerChoice",
    "PhaseChoice",
    "TrackerChoice",
]


@frozen
class Choice:
    """A component that was found in the registry, and its options.

    A config class may have fields of a subclass's type, or lists of it: components nest to any depth.

    Attributes:
        name: the component's name.
        options: instance of the spec's config class; None for a component without options.
        given: the options that the user wrote, as opposed to those that are there by default.
        spec: what the plugin registered.
    """

    kind: ClassVar[str] = "component"

    name: str
    options: Any
    given: frozenset[str]
    spec: Spec

    def build(self, *args: Any) -> Any:
        """Import the factory and call it as ``factory(options, *args)``.

        Raises:
            EnvironmentProblem: the factory's module cannot be imported.
            ComponentError: the module does not have the factory.
        """
        try:
            factory = resolve(self.spec.target)
        except AttributeError as error:
            raise ComponentError(f"{self.kind} '{self.name}': {self.spec.target} does not exist: {error}") from error
        except Exception as error:
            raise EnvironmentProblem(
                f"{self.kind} '{self.name}': {self.spec.target} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return factory(self.options, *args)


@frozen
class OptimizerChoice(Choice):
    """``build(trainable) -> torch.optim.Optimizer``."""

    kind: ClassVar[str] = "optimizer"


@frozen
class MaskingChoice(Choice):
    """``build() -> MaskingStrategy``."""

    kind: ClassVar[str] = "masking"


@frozen
class PhaseChoice(Choice):
    """``build() -> Phase``."""

    kind: ClassVar[str] = "phase"


@frozen
class ModelChoice(Choice):
    """``build(vocabulary_size) -> torch.nn.Module``."""

    kind: ClassVar[str] = "model"


@frozen
class DataChoice(Choice):
    """``build() -> DataSource``."""

    kind: ClassVar[str] = "data"


@frozen
class TrackerChoice(Choice):
    """``build() -> object`` with observer hooks."""

    kind: ClassVar[str] = "tracker"


@frozen
class ExporterChoice(Choice):
    """``build() -> Exporter``."""

    kind: ClassVar[str] = "exporter"


@frozen
class CheckChoice(Choice):
    """``build() -> Check``."""

    kind: ClassVar[str] = "check"
