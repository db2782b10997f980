"""The kinds of component that only runs know: observers, exporters, importers, checks, what
manifests name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of, matches_re

from arb_ternary.specs import TARGET_PATTERN, Spec

_target = [instance_of(str), matches_re(re.compile(TARGET_PATTERN))]


def _as_tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@frozen(kw_only=True)
class TrackerSpec(Spec):
    """An observer of runs. Factory: ``(config) -> object`` that implements observer hooks
    (``arb_run_start`` ...).
    """

    kind = "tracker"
    hook = "arb_register_trackers"
    noun = "tracker"
    hookspecs = "arb_ternary_train.hookspecs"


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
    """Draws from the model of a run: ``arb generate RUN ...`` hands over to it.

    The target is a ``click.Command`` whose first argument is the run; its options are those of
    ``arb generate`` for such runs. Of the generators that a run suits, the one is taken that names
    most of what the run has.

    Attributes:
        models: names of the models that it draws from; empty = any.
        masking: names of the masking strategies that they were trained with; empty = any.
        data: names of the data sources that they were trained on; empty = any.
    """

    kind = "generator"
    hook = "arb_register_generators"
    noun = "generator"

    models: tuple[str, ...] = field(
        default=(), converter=_as_tuple, validator=deep_iterable(instance_of(str))
    )
    masking: tuple[str, ...] = field(
        default=(), converter=_as_tuple, validator=deep_iterable(instance_of(str))
    )
    data: tuple[str, ...] = field(
        default=(), converter=_as_tuple, validator=deep_iterable(instance_of(str))
    )


@frozen(kw_only=True)
class ImporterSpec(Spec):
    """Reads a model that another program has written. Factory: ``(config) -> Importer``.

    Attributes:
        schemes: what the addresses begin with that ``FetchesSources.fetch`` of the importer takes:
            ``("hf",)`` for ``hf://...``; empty for an importer that reads files and folders only.
    """

    kind = "importer"
    hook = "arb_register_importers"
    noun = "importer"

    schemes: tuple[str, ...] = field(
        default=(), converter=_as_tuple, validator=deep_iterable(instance_of(str))
    )


@frozen(kw_only=True)
class PolicySpec(Spec):
    """Decides, step by step, how a training loop goes on. Factory: ``(config) -> StepPolicy``, one
    a loop.
    """

    kind = "policy"
    hook = "arb_register_policies"
    noun = "step policy"


@frozen(kw_only=True)
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
        priority: listings begin with the highest, and it is what ``arb config new`` writes when
            none is named.
    """

    kind = "starter"
    hook = "arb_register_starters"
    noun = "starter config"

    document: str = field(default="run", validator=instance_of(str))
    priority: int = field(default=10, validator=instance_of(int))


@frozen(kw_only=True)
class TrainerSpec(Spec):
    """What runs a manifest's targets; ``trainer: trainer.NAME`` there.

    Target: ``(keys, run: TargetRun) -> Mapping``, the settings of a config of ``arb train`` (see
    ``arb_ternary_train.manifest.protocol``). ``config``: the class of the keys of ``train:``, best
    a subclass of ``arb_ternary_train.manifest.keys.TrainKeys``. Faults are raised as ``Faulty``,
    with paths inside the run.
    """

    kind = "trainer"
    hook = "arb_register_trainers"
    noun = "trainer"

    config: str = field(validator=_target)


@frozen(kw_only=True)
class SystemSpec(Spec):
    """What a manifest's target trains; ``system: {ref: system.NAME, config: {...}}`` there.

    Target: ``(config: Mapping) -> Mapping``: from the plain values under ``config`` (an empty
    mapping where there are none) to the ``model:`` section of a config of ``arb train``, with its
    ``name``. What it cannot be is raised as ``arb_ternary.config.errors.Faulty``, with paths inside
    ``config``, so that the user reads the line.
    """

    kind = "system"
    hook = "arb_register_systems"
    noun = "system"


@frozen(kw_only=True)
class TrainKeysSpec(Spec):
    """Keys of a manifest's ``train:`` that a plugin brings: all that begin with ``NAME_``, whatever
    the trainer is.

    Target: ``(keys, settings: Mapping) -> Mapping``: the settings of a config of ``arb train`` as
    the trainer made them, changed. ``config``: the class of the keys, without the prefix. Called
    where the user wrote one of the keys.
    """

    kind = "train_keys"
    hook = "arb_register_train_keys"
    noun = "family of training keys"

    config: str = field(validator=_target)
