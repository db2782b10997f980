"""Specs: frozen descriptions of components with lazy targets, which hooks return.

A hook returns specs, never components, so that no heavy import is needed to collect the installed
plugins. ``target``, ``config`` and ``probe`` are ``"module:attribute"`` strings. They are imported
only when a run names the component.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, Final, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, in_, instance_of, matches_re, optional

from arb_ternary.environment import Variable
from arb_ternary.errors import ComponentError, EnvironmentProblem

#: The name of a component: lower-case words, with a dot between family and member.
NAME_PATTERN = r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*"
#: A lazy target: ``package.module:attribute``.
TARGET_PATTERN = r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"

#: What an optimizer can train.
TrainedPart = Literal["ternary", "float"]

_name = [instance_of(str), matches_re(re.compile(NAME_PATTERN))]
_target = [instance_of(str), matches_re(re.compile(TARGET_PATTERN))]

# One function per type, because type checkers cannot infer the element type of a generic converter.


def _as_tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _as_variables(values: Iterable[Variable]) -> tuple[Variable, ...]:
    return tuple(values)


def _as_parts(values: Iterable[TrainedPart]) -> frozenset[TrainedPart]:
    return frozenset(values)


def _texts(default: Iterable[str] = ()) -> Any:
    """Return a field of texts."""
    return field(default=default, converter=_as_tuple, validator=deep_iterable(instance_of(str)))


def resolve(target: str) -> Any:
    """Import ``"module:attribute"`` (or ``"module"``) and return the attribute (or the module).

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    found: Any = import_module(module_name)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    return found


def load_target(what: str, target: str) -> Any:
    """Import a target as :func:`resolve` does, with errors for a user that begin with ``what``.

    Raises:
        EnvironmentProblem: the module cannot be imported.
        ComponentError: the module has no such attribute, or changes torch's default dtype.
    """
    try:
        with keeping_default_dtype(f"{what} {target}"):
            return resolve(target)
    except ComponentError:
        raise
    except AttributeError as error:
        raise ComponentError(f"{what} {target} does not exist: {error}") from error
    except Exception as error:
        raise EnvironmentProblem(
            f"{what} {target} cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def keeping_default_dtype(what: str) -> Iterator[None]:
    """Put torch's default dtype back if a ``with`` block changes it: scales would get it too.

    Raises:
        ComponentError: the block changed it; the message begins with ``what``.
    """
    before = _default_dtype()
    try:
        yield
    finally:
        after = _default_dtype()
        if after != before:
            torch = sys.modules["torch"]
            torch.set_default_dtype(getattr(torch, before))
    if after != before:
        raise ComponentError(
            f"{what} changes torch's default dtype from {before} to {after}",
            "Name the dtype where a tensor is made: dtype=torch.float64.",
        )


def _default_dtype() -> str:
    """Return the name of torch's default dtype; the one that torch starts with before an import."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "float32"
    return str(torch.get_default_dtype()).removeprefix("torch.")


@frozen(kw_only=True)
class Spec:
    """A component. A subclass is a kind of component.

    Attributes:
        kind: class attribute: the name of the kind in code and in messages to authors of plugins.
        hook: class attribute: the hook that registers components of the kind.
        noun: class attribute: the noun for a component of the kind in messages.
        name: the name by which a config names the component.
        target: factory, ``"module:attribute"``; its signature is in the docstring of the subclass.
        config: the attrs class of the options of the component, ``"module:attribute"``; None for a
            component without options.
        summary: one line for listings.
        variables: environment variables that the component reads.
        libraries: distributions that the component needs; ``arb doctor`` prints their versions.
    """

    kind: ClassVar[str]
    hook: ClassVar[str]
    noun: ClassVar[str]

    name: str = field(validator=_name)
    target: str = field(validator=_target)
    config: str | None = field(default=None, validator=optional(_target))
    summary: str = field(default="", validator=instance_of(str))
    variables: tuple[Variable, ...] = field(
        default=(), converter=_as_variables, validator=deep_iterable(instance_of(Variable))
    )
    libraries: tuple[str, ...] = _texts()


@frozen(kw_only=True)
class BackendSpec(Spec):
    """A kernel backend. Factory: ``() -> KernelBackend``.

    Attributes:
        probe: ``(device: str) -> ProbeResult``, ``"module:attribute"``. It must not import the
            kernel library, and must not initialise an accelerator: use
            ``importlib.util.find_spec`` and package metadata.
        priority: ``auto`` prefers the highest; the reference backend has 0.
        devices: the torch device types that the backend can serve.
    """

    kind = "backend"
    hook = "arb_register_backends"
    noun = "backend"

    probe: str = field(validator=_target)
    priority: int = field(default=10, validator=instance_of(int))
    devices: tuple[str, ...] = _texts(("cpu",))


@frozen(kw_only=True)
class OptimizerSpec(Spec):
    """An optimizer. Factory: ``(config, trainable: Trainable) -> torch.optim.Optimizer``.

    Attributes:
        accepts: which parts of a model the optimizer can train: ternary modules or float
            parameters. A wrapper accepts what its inner optimizer accepts.
        auto_rate: ``(plan) -> float``, ``"module:attribute"``: the rate of a run with ``lr: auto``;
            None if ``lr`` is always a number.
    """

    kind = "optimizer"
    hook = "arb_register_optimizers"
    noun = "optimizer"

    accepts: frozenset[TrainedPart] = field(
        converter=_as_parts, validator=deep_iterable(in_(("ternary", "float")))
    )
    auto_rate: str | None = field(default=None, validator=optional(_target))


class MaskingSpec(Spec):
    """A masking strategy. Factory: ``(config) -> MaskingStrategy``."""

    kind = "masking"
    hook = "arb_register_masking"
    noun = "masking strategy"


class PhaseSpec(Spec):
    """A trainer phase. Factory: ``(config) -> Phase``."""

    kind = "phase"
    hook = "arb_register_phases"
    noun = "phase"


class ModelSpec(Spec):
    """A model.

    Factory: ``(config, vocabulary_size: int) -> torch.nn.Module`` with ``forward(tokens_BS) ->
    logits_BSV``.
    """

    kind = "model"
    hook = "arb_register_models"
    noun = "model"


class DataSpec(Spec):
    """A data source. Factory: ``(config) -> DataSource``."""

    kind = "data"
    hook = "arb_register_datasets"
    noun = "data source"


class TrackerSpec(Spec):
    """An observer of runs. Factory: ``(config) -> object`` that implements observer hooks
    (``arb_run_start`` ...).
    """

    kind = "tracker"
    hook = "arb_register_trackers"
    noun = "tracker"


@frozen(kw_only=True)
class ExporterSpec(Spec):
    """Writes a trained model in another form. Factory: ``(config) -> Exporter``.

    Attributes:
        suffix: the file name ending that the exporter writes, with its dot; empty when it writes a
            folder.
    """

    kind = "exporter"
    hook = "arb_register_exporters"
    noun = "exporter"

    suffix: str = field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class GeneratorSpec(Spec):
    """Generates from a model; ``arb generate SOURCE ...`` calls it.

    The target is a ``click.Command`` whose first argument is the run. Its options are those of
    ``arb generate`` for such runs. If several generators fit a run, the one that names most of its
    components is used. A model that another program has written fits a generator that names none.

    Attributes:
        models: names of the models that it supports; empty = any.
        masking: names of the masking strategies of their training; empty = any.
        data: names of the data sources of their training; empty = any.
    """

    kind = "generator"
    hook = "arb_register_generators"
    noun = "generator"

    models: tuple[str, ...] = _texts()
    masking: tuple[str, ...] = _texts()
    data: tuple[str, ...] = _texts()


@frozen(kw_only=True)
class ImporterSpec(Spec):
    """Reads a model that another program has written. Factory: ``(config) -> Importer``.

    Attributes:
        schemes: schemes of the addresses that the importer can fetch: ``("hf",)`` for
            ``hf://...``; empty for an importer that reads files and folders only.
    """

    kind = "importer"
    hook = "arb_register_importers"
    noun = "importer"

    schemes: tuple[str, ...] = _texts()


class PolicySpec(Spec):
    """Decides after each step how a training loop goes on.

    Factory: ``(config) -> StepPolicy``, called once per loop.
    """

    kind = "policy"
    hook = "arb_register_policies"
    noun = "step policy"


class CheckSpec(Spec):
    """A check that passes or fails a finished run. Factory: ``(config) -> Check``."""

    kind = "check"
    hook = "arb_register_checks"
    noun = "check"


@frozen(kw_only=True)
class StarterSpec(Spec):
    """A config to start from. Target: a mapping of settings.

    Attributes:
        document: name of the kind of config file that the settings are for.
        priority: listings begin with the highest, which is also the default of ``arb config new``.
    """

    kind = "starter"
    hook = "arb_register_starters"
    noun = "template"

    document: str = field(default="run", validator=instance_of(str))
    priority: int = field(default=10, validator=instance_of(int))


class CommandSpec(Spec):
    """A command of ``arb``. The target is a ``click.Command`` (or group), imported when the command
    is invoked.

    A name with a dot is a command of a group: ``plugins.check`` is ``arb plugins check``.
    """

    kind = "command"
    hook = "arb_register_commands"
    noun = "command"


@frozen(kw_only=True)
class DocumentSpec:
    """A kind of config file, registered by ``arb_register_documents``.

    Attributes:
        name: how ``--document`` calls it.
        target: ``(path, overrides: Sequence[str]) -> LoadedConfig``, ``"module:attribute"``.
        config: the root class, which says what such a file may hold, ``"module:attribute"``.
        command: what such a file is for, without the name of the file: ``arb train``.
        resolve: ``(loaded: LoadedConfig) -> LoadedConfig``, ``"module:attribute"``: replaces
            options that are ``auto`` by their values, for ``arb config show``; None if there are
            none.
        summary: one line for listings.
    """

    name: str = field(validator=_name)
    target: str = field(validator=_target)
    config: str = field(validator=_target)
    command: str = field(validator=instance_of(str))
    resolve: str | None = field(default=None, validator=optional(_target))
    summary: str = field(default="", validator=instance_of(str))


#: The kinds of component that the program knows. Their hooks are in ``arb_ternary.hookspecs``.
KINDS: Final = (
    BackendSpec,
    OptimizerSpec,
    MaskingSpec,
    PhaseSpec,
    ModelSpec,
    DataSpec,
    TrackerSpec,
    ExporterSpec,
    ImporterSpec,
    GeneratorSpec,
    PolicySpec,
    CheckSpec,
    StarterSpec,
    CommandSpec,
)
