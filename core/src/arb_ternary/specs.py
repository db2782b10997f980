"""What a plugin hands to the program: frozen descriptions with lazy targets.

A hook returns specs, never components, so that collecting every installed plugin costs no heavy import. ``target``,
``config`` and ``probe`` are ``"module:attribute"`` strings; they are imported only when a run names the component.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, in_, instance_of, matches_re, optional

__all__ = [
    "BackendSpec",
    "CheckSpec",
    "CommandSpec",
    "DataSpec",
    "DocumentSpec",
    "ExporterSpec",
    "MaskingSpec",
    "ModelSpec",
    "OptimizerSpec",
    "PhaseSpec",
    "RecipeSpec",
    "Spec",
    "StarterSpec",
    "TrackerSpec",
    "resolve",
]

#: A component's name: lower-case words, with dots between families and members (``gqc.gnts``).
NAME_PATTERN = r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*"
#: A lazy target: ``package.module:attribute``.
TARGET_PATTERN = r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"

#: What an optimizer can train.
TrainedPart = Literal["ternary", "float", "stored"]

_name = matches_re(re.compile(NAME_PATTERN))
_target = matches_re(re.compile(TARGET_PATTERN))


# Typed, because a type checker cannot infer the element type of a bare ``tuple`` or ``frozenset`` as a converter.


def _as_tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _as_parts(values: Iterable[TrainedPart]) -> frozenset[TrainedPart]:
    return frozenset(values)


def resolve(target: str) -> Any:
    """Import ``"module:attribute"`` and return the attribute.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    found: Any = import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


@frozen(kw_only=True)
class Spec:
    """Common to every kind of component.

    Attributes:
        name: what a config calls the component.
        target: factory, ``"module:attribute"``; its signature is in the docstring of the subclass.
        config: the attrs class that the component's config section is structured into, ``"module:attribute"``;
            None for a component without options.
        summary: one line for listings.
    """

    kind: ClassVar[str] = "component"

    name: str = field(validator=[instance_of(str), _name])
    target: str = field(validator=[instance_of(str), _target])
    config: str | None = field(default=None, validator=optional(_target))
    summary: str = field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class BackendSpec(Spec):
    """A kernel backend. Factory: ``() -> KernelBackend``.

    Attributes:
        probe: ``(device: str) -> ProbeResult``, ``"module:attribute"``. It must not import the kernel library, and must
            not initialise an accelerator: ``importlib.util.find_spec`` and package metadata come first.
        priority: ``auto`` tries the highest first; the reference backend has 0.
        devices: the torch device types that the backend can serve.
    """

    kind: ClassVar[str] = "backend"

    probe: str = field(validator=[instance_of(str), _target])
    priority: int = field(default=10, validator=instance_of(int))
    devices: tuple[str, ...] = field(default=("cpu",), converter=_as_tuple, validator=deep_iterable(instance_of(str)))


@frozen(kw_only=True)
class OptimizerSpec(Spec):
    """An optimizer. Factory: ``(config, trainable: Trainable) -> torch.optim.Optimizer``.

    Attributes:
        accepts: which parts of a model the optimizer can train: ternary modules, float parameters or both; ``stored``
            for modules with integer weights of their own format, since interface 1.1 (``arb_ternary.ternary.stored``).
            A wrapper accepts what its inner optimizer accepts and declares both.
    """

    kind: ClassVar[str] = "optimizer"

    accepts: frozenset[TrainedPart] = field(
        converter=_as_parts, validator=deep_iterable(in_(("ternary", "float", "stored")))
    )


@frozen(kw_only=True)
class MaskingSpec(Spec):
    """A masking strategy. Factory: ``(config) -> MaskingStrategy``."""

    kind: ClassVar[str] = "masking"


@frozen(kw_only=True)
class PhaseSpec(Spec):
    """A trainer phase. Factory: ``(config) -> Phase``."""

    kind: ClassVar[str] = "phase"


@frozen(kw_only=True)
class ModelSpec(Spec):
    """A model.

    Factory: ``(config, vocabulary_size: int) -> torch.nn.Module`` with ``forward(tokens_BS) -> logits_BSV``.
    """

    kind: ClassVar[str] = "model"


@frozen(kw_only=True)
class DataSpec(Spec):
    """A data source. Factory: ``(config) -> DataSource``."""

    kind: ClassVar[str] = "data"


@frozen(kw_only=True)
class TrackerSpec(Spec):
    """An observer of runs. Factory: ``(config) -> object`` that implements observer hooks (``arb_run_start`` ...)."""

    kind: ClassVar[str] = "tracker"


@frozen(kw_only=True)
class ExporterSpec(Spec):
    """Writes a trained model in another form. Factory: ``(config) -> Exporter``.

    Attributes:
        suffix: the file name ending that the exporter writes, with its dot; empty when it writes a folder.
    """

    kind: ClassVar[str] = "exporter"

    suffix: str = field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class CommandSpec(Spec):
    """A command of ``arb``. The target is a ``click.Command`` (or group), imported when the command is invoked."""

    kind: ClassVar[str] = "command"


@frozen(kw_only=True)
class CheckSpec(Spec):
    """A check that passes or fails a finished run. Factory: ``(config) -> Check``."""

    kind: ClassVar[str] = "check"


@frozen(kw_only=True)
class RecipeSpec(Spec):
    """A way of training that ``arb bench quality`` measures. Factory: ``(steps: int) -> Recipe``.

    ``steps`` is the number of optimizer steps of the run that the recipe is for. Since interface 1.1.
    """

    kind: ClassVar[str] = "recipe"


@frozen(kw_only=True)
class DocumentSpec(Spec):
    """A kind of config file. Target: ``(path, overrides: Sequence[str]) -> LoadedConfig``; ``config``: its root class.

    The root class says what the file may hold, so ``config`` is required here.
    """

    kind: ClassVar[str] = "document"

    config: str = field(validator=[instance_of(str), _target])


@frozen(kw_only=True)
class StarterSpec(Spec):
    """A config to start from. Target: a mapping of settings, or a callable that returns one.

    Attributes:
        document: name of the kind of config file that the settings are for.
    """

    kind: ClassVar[str] = "starter"

    document: str = field(default="run", validator=[instance_of(str), _name])
