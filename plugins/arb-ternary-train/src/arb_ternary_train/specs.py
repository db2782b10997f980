"""The kinds of component that only manifests know.

The other kinds are in ``arb_ternary.specs``; importing them from here is deprecated.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from attrs import field, frozen
from attrs.validators import instance_of, matches_re

from arb_ternary import specs
from arb_ternary.specs import TARGET_PATTERN, Spec

_target = [instance_of(str), matches_re(re.compile(TARGET_PATTERN))]
#: Names that moved to ``arb_ternary.specs``.
_MOVED = (
    "CheckSpec",
    "ExporterSpec",
    "GeneratorSpec",
    "ImporterSpec",
    "PolicySpec",
    "StarterSpec",
    "TrackerSpec",
)


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"arb_ternary_train.specs.{name} has moved: import it from arb_ternary.specs",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(specs, name)


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
