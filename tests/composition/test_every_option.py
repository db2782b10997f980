"""Every option changes the bytes of a run or is a config error; so is every number, or it trains.

The options come from the registry: a plugin that is installed adds its components without an edit
here. Weights, the optimizer's state and the metrics of a run of three tiny steps are compared.
Options that by their nature change none of these bytes are listed below with the reason.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args
from zlib import crc32

import attrs
import pytest
import torch

from arb_ternary.backends.select import reset_backends
from arb_ternary.config.fields import config_fields, default_of, shape_of
from arb_ternary.config.structure import options_class, structure_with_faults
from arb_ternary.config.yaml_document import Document, dump_yaml
from arb_ternary.errors import ArbError, CheckpointError, ConfigError, Interrupted
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import KINDS
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.step import Diverged
from arb_ternary_upcycle.float_model import float_config, neutral_tensors, write_float_model
from arb_test_support.kinds_of_data import TEXT, KindOfData, kind_of_masking, kind_of_model

FLOATS: Final = ["embedding", "head", "norms", "linears"]
MIXED: Final = ["norms", "head"]
SPLIT: Final = {"name": "split", "ternary": {"name": "scaled_votes"}, "float": {"name": "adamw"}}
MODEL: Final = {
    "name": "decoder",
    "width": 16,
    "layers": 1,
    "heads": 2,
    "max_length": 16,
    "group_size": 32,
}
#: Options of a phase of three short steps; a phase takes those that it has.
BRIEF: Final = {
    "steps": 3,
    "batch_size": 2,
    "block_size": 8,
    "eval_every": 0,
    "accum_threshold": 1,
    "target_stacks": 3,
    "steps_per_stack": 1,
    "blocks_per_stack": 1,
}

#: Options that by their nature change none of the bytes, and the reason.
BY_NATURE: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("log_every", "eval_every", "eval_batches"),
        "what is shown and evaluated, not what is trained",
    ),
    **dict.fromkeys(
        ("num_workers", "compile_model", "foreach"), "how fast it is computed, not what"
    ),
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpoint_threshold"), "memory for time"
    ),
    **dict.fromkeys(
        ("cache_activations", "cache_bytes", "cache_folder"), "memory or disk for time"
    ),
    **dict.fromkeys(
        ("teacher_memory", "cache_teacher_outputs", "cache_memory"), "memory or disk for time"
    ),
    **dict.fromkeys(
        ("max_skipped", "max_stacks", "max_length"), "a limit that these runs do not reach"
    ),
    **dict.fromkeys(
        ("nan_policy", "non_finite"),
        "of gradients that are not finite, of which there are none here",
    ),
    **dict.fromkeys(
        ("init_from", "path", "train", "validation", "tokenizer"), "a path, or the name of a file"
    ),
    "teacher": "a folder",
    "blockwise_autotune_log_every": "what is shown",
    "custom_time_mapping": "the name of a function",
    **dict.fromkeys(
        ("dtype", "vocabulary_size"), "what a token file holds: another value is another file"
    ),
    **dict.fromkeys(
        ("band", "votes.band"), "how far exponents may move: in a few steps none comes so far"
    ),
    **dict.fromkeys(
        ("image_size", "channels"),
        "what the images are: with others, images of this size are refused",
    ),
    "dead_band": "a tolerance about the number of flips, which these runs exceed",
    "maximum": "what a finished run is judged by",
    "validation_fraction": "where the text is cut: three steps may draw the same samples of either "
    "part",
    "tuning": "which part of the text is held out: three steps may draw the same samples",
    "sliding_window": "a window as long as a sample hides nothing; it is tried with a shorter one "
    "below",
}
#: The same for an option of one component.
BY_NATURE_OF: Final = {
    "blockwise.blockwise_autotune_enabled": "by itself it only says what it sees; what it does is "
    "tried with its mode",
    "gqc.gnts.per_group": "each group meets or misses the threshold as all of them do",
    **dict.fromkeys(
        ("labels.augment.name", "labels.augment.amount", "labels.augment.chance"),
        "changes images, which these runs on text have not; its own tests try every change",
    ),
}
#: Values where those that follow from an option's type would do nothing, or something else, in
#: three steps.
VALUES: Final[dict[str, list[Any]]] = {
    "sliding_window": [3],
    "float_parts": [["norms"]],
    "mask_token_id": [254],
    "fractions": [[0.5]],
    "time_step_fractions": [[0.5]],
    "qlora_configs": [{0: {"rank": 2, "alpha": 2.0}}],
    "heads": [1],
    "kv_heads": [1],
    "head_dim": [4],
    "rotary_factors": [[1.0, 2.0, 4.0, 8.0]],
    "inner_gains": [True],
    "tie_embeddings": [True],
    "lr_schedule": ["linear", "constant"],
    "batch_doublings": [[0.5]],
    "steps": [2],
    "grad_clip": [1e-3],
    "clip": [0.5],
    "power": [3.0],
    "schedule.batches": [2],
    "threshold": [100.0],
    "target_norm": [0.25],
    "gain": [1.0, 0.5, 1000.0],
    "accum_threshold": [2, 1, 8],
    "confidence": [0.5],
    "error_tolerance": [1e-4, 0.5],
    "noise_multiplier": [1e-3, 50.0],
    "max_batch_draws": [1],
    "decay_steps": [1],
    "freeze": [["head"], ["blocks.0.attention"]],
    "rate_factors": [{"head": 0.1}, {"blocks.0.attention": 0.1}],
    "init_skip": [["head"]],
    "tau": [1e-3],
    "switch_threshold": [1e-12],
    "window": [3],
    "convergence_target": [1e9],
    "convergence_patience": [1],
    "convergence_max_steps": [1],
    "blockwise_autotune_plateau_patience": [1],
    "blockwise_autotune_min_lr": [1.0],
}
#: Options of a component that its other options need.
COMPANIONS: Final[dict[str, dict[str, Any]]] = {
    "optimizer.gqc.sbc": {"initial_logical_batch_size": 2.0},
    "optimizer.gqc.gnts": {"threshold": 0.05, "max_batch_draws": 3},
    "optimizer.gqc.mht": {"error_tolerance": 1e-3, "max_batch_draws": 3},
    "optimizer.gqc.gns": {"max_batch_draws": 3},
    "optimizer.sign_votes": {"accum_threshold": 2},
    "optimizer.signgsd": {"votes": {"accum_threshold": 1, "lr": 3.0}},
    "phase.progressive": {"steps_per_stack": 3},
    "optimizer.scaled_votes": {"lr": 1.0},
    "optimizer.adagc": {"warmup": 1, "max_norm": 1e-3},
    "optimizer.nowcasting": {"every": 3, "window": 2, "spacing": 1},
    "optimizer.swats": {"min_steps_before_switch": 1, "switch_threshold": 1.0},
    "optimizer.momentum_votes": {"flip_rate": 0.5, "quanta": 20.0},
    "phase.blockwise": {"teacher": "teacher"},
    "phase.global": {"teacher": "teacher"},
}
_ACTIVE: Final = {"blockwise_autotune_enabled": True, "blockwise_autotune_mode": "active"}
#: Options that one option needs, and that would make other options of its component idle.
COMPANIONS_OF: Final[dict[str, dict[str, Any]]] = {
    "decoder.vector_trits": {"row_scales": True},
    "global.kd_temperature": {"kd_weight": 1.0},
    "blockwise.convergence_patience": {"convergence_target": 1e-9, "convergence_max_steps": 6},
    "blockwise.convergence_max_steps": {"convergence_target": 1e-9, "convergence_max_steps": 6},
    "blockwise.blockwise_autotune_mode": {
        "blockwise_autotune_enabled": True,
        "blockwise_autotune_plateau_patience": 1,
    },
    "blockwise.blockwise_autotune_plateau_patience": _ACTIVE,
    "blockwise.blockwise_autotune_lr_decay": {**_ACTIVE, "blockwise_autotune_plateau_patience": 1},
    "blockwise.blockwise_autotune_min_lr": {**_ACTIVE, "blockwise_autotune_plateau_patience": 1},
}
#: Phases that learn from a teacher, and the teacher's sizes, which are the student's.
TAUGHT: Final = {"blockwise", "global"}
TEACHER: Final = {key: value for key, value in MODEL.items() if key not in ("name", "group_size")}
#: Phases that take no step of their own, because they read, convert, judge, measure or write, or
#: that need what such a phase has made: their own tests try what each option does.
IN_A_PIPELINE: Final = {
    *("load_teacher", "fold_rotate", "surgery", "projection"),
    *("verify", "benchmark", "export"),
}
#: Numbers that nobody wants, and that somebody types.
EXTREMES: Final = (-1, 0, math.nan, math.inf, 2**63, 1e-300, 1e39)
#: The largest whole number of an option, and the largest and smallest numbers of float32.
LIMITS: Final = (2**31 - 1, 3.4028234663852886e38, 2.0**-126)
#: One in this number of options trains in `make test`.
TRAINED: Final = 50
#: Steps of runs in which three steps show no effect of a component.
STEPS: Final = {
    "phase.blockwise": 6,
    "optimizer.momentum_votes": 10,
    "optimizer.sign_votes": 5,
    "optimizer.signgsd": 5,
}


def registered(kind: str) -> list[Any]:
    return list(manager().registry.all(kind))


def options(
    cls: type[Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], attrs.Attribute[Any]]]:
    """Yield path and attribute of every option, with nested sections and without components."""
    for field in config_fields(cls):
        shapes = {shape_of(arm): arm for arm in (*get_args(field.type), field.type)}
        if "choice" in shapes:
            continue
        if "class" in shapes and shape_of(field.type) != "mapping":
            yield from options(shapes["class"], (*prefix, str(field.alias)))
        else:
            yield (*prefix, str(field.alias)), field


def candidates(path: tuple[str, ...], field: attrs.Attribute[Any]) -> list[Any]:
    """Return other values that an option may have."""
    for key in (".".join(path), path[-1]):
        if key in VALUES:
            return [value for value in VALUES[key] if valid(field, value)]
    default = default_of(field)
    arms = [*get_args(field.type), field.type]
    found: list[Any] = []
    for arm in arms:
        if shape_of(arm) == "literal":
            found += get_args(arm)
        elif arm is bool:
            found += [True, False]
        elif arm in (int, float) and not isinstance(default, bool):
            numbers = [default] if isinstance(default, int | float) else []
            found += [
                arm(each) for number in numbers for each in (number * 2, number / 2, number + 1)
            ] + [
                arm(2),
                arm(1),
            ]
    return [value for value in dict.fromkeys(found) if value != default and valid(field, value)][:8]


def valid(field: attrs.Attribute[Any], value: Any) -> bool:
    try:
        if field.validator is not None:
            field.validator(None, field, value)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def context(kind: str, found: Any) -> tuple[dict[str, Any], tuple[str | int, ...]]:
    """Return a run that uses the component, and the path of its options."""
    config: dict[str, Any] = {
        "name": "every_option",
        "data": {"name": "text", "path": "text.txt", "tokenizer": "bytes"},
        "model": {**MODEL, "float_parts": MIXED},
        "optimizer": SPLIT,
        "phases": [{"name": "standard", **brief("phase", "standard")}],
        "checkpoint": {"every": 3, "keep": 1},
    }
    name = found.spec.name
    section = {"name": name, **brief(kind, name), **COMPANIONS.get(f"{kind}.{name}", {})}
    where: tuple[str | int, ...] = (kind,)
    if kind == "optimizer":
        accepts = found.spec.accepts
        parts = {frozenset({"ternary"}): [], frozenset({"float"}): FLOATS}.get(accepts, MIXED)
        config["model"]["float_parts"] = parts
        if parts is FLOATS:
            config["model"].pop("group_size")
        fields = config_fields(options_class(found.spec) or object)
        if any(field.name == "inner" for field in fields):
            section["inner"] = SPLIT if "ternary" in accepts else {"name": "adamw"}
    images = (
        kind_of_model(name)
        if kind == "model"
        else kind_of_masking(name)
        if kind == "masking"
        else TEXT
    )
    if images is not TEXT:
        return of_other_data(config, kind, section, images), where
    if kind == "model":
        section = {**MODEL, "float_parts": ["head"], **section}
        if name != "decoder":
            section["float_parts"] = FLOATS
            section.pop("group_size")
            config["optimizer"] = {"name": "adamw"}
    if kind == "data":
        section = {"shakespeare": section, "text": config["data"]}.get(name, {})
    if kind == "phase":
        where = ("phases", 0)
        config["phases"] = [section]
        if name in TAUGHT:
            config["model"] |= {"architecture": "llama", "float_parts": ["norms"]}
        else:
            config["masking"] = {"name": "time_step"}
    else:
        config[kind] = section
    if kind == "masking":
        timed = {**brief("phase", "progressive"), "eval_every": 1, "eval_batches": 1}
        config["phases"] = [{"name": "progressive", **timed}]
    if f"{kind}.{name}" in STEPS:
        steps = STEPS[f"{kind}.{name}"]
        config["phases"][0]["steps"] = config["checkpoint"]["every"] = steps
    return config, where


def of_other_data(
    config: dict[str, Any], kind: str, section: dict[str, Any], data: KindOfData
) -> dict[str, Any]:
    """Return the run ``config`` on samples that are not text, or for models that read all of the
    text.
    """
    model = next((each for each in data.models if each["name"] == section["name"]), data.models[0])
    phase = {key: value for key, value in BRIEF.items() if key not in TEXT.phase}
    known = brief("phase", "standard").keys()
    return {
        **config,
        "data": config["data"] if data.data == TEXT.data else dict(data.data),
        "model": {**model, "float_parts": ["head"]},
        "masking": section if kind == "masking" else {"name": data.masking[0]},
        "phases": [
            {
                "name": "standard",
                **{key: value for key, value in phase.items() if key in known},
                **data.phase,
            }
        ],
    }


@cache
def brief(kind: str, name: str) -> Mapping[str, Any]:
    cls = options_class(manager().registry.get(kind, name).spec)
    known = {field.alias for field in config_fields(cls)} if cls is not None else set()
    return {key: value for key, value in BRIEF.items() if key in known} if kind == "phase" else {}


def cases() -> Iterator[Any]:
    for kind in ("optimizer", "masking", "phase", "model", "data"):
        for found in registered(kind):
            if kind == "phase" and found.spec.name in IN_A_PIPELINE:
                continue
            yield from cases_of(kind, found)


def cases_of(kind: str, found: Any) -> Iterator[Any]:
    """Yield every option of a component: `make test` tries one, `make test-all` the rest."""
    cls = options_class(found.spec)
    if cls is None or context(kind, found)[0].get(kind) == {}:
        return
    named = {
        f"{kind}-{found.spec.name}-{'.'.join(path)}": (path, field) for path, field in options(cls)
    }
    active = [name for name, (path, _) in named.items() if not reason_to_skip(found, path)]
    chosen = min(active, key=lambda name: crc32(name.encode()), default="")
    for name, (path, field) in named.items():
        marks = () if name == chosen else pytest.mark.extended
        yield pytest.param(kind, found, path, field, id=name, marks=marks)


def reason_to_skip(found: Any, path: tuple[str, ...]) -> str:
    """Return why an option changes none of the bytes; empty if it should."""
    name = found.spec.name
    if path[-1] in BY_NATURE and path[-1] not in VALUES:
        return BY_NATURE[path[-1]]
    if path[0] == "schedule" and name.startswith("gqc.") and name != "gqc.gnr":
        return (
            "the schedule of gqc.gnr, whose quantity acts in every step; others decide the same "
            "way or not"
        )
    return BY_NATURE_OF.get(f"{name}.{'.'.join(path)}", "")


def placed(
    config: Mapping[str, Any], where: tuple[str | int, ...], path: tuple[str, ...], value: Any
) -> dict[str, Any]:
    """Return ``config`` with another value of an option."""
    changed: Any = deepcopy(dict(config))
    holder = changed
    for key in (*where, *path[:-1]):
        if isinstance(holder, dict) and key not in holder:
            holder[key] = {"batches": 3} if key == "schedule" else {}
        holder = holder[key]
    holder[path[-1]] = value
    return changed  # type: ignore[no-any-return]


class Runs:
    """The bytes of runs; each config is trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[bytes, ...]] = {}

    def load(self, config: Mapping[str, Any], path: Path) -> RunConfig:
        """Write the config of a run to ``path``, and load it.

        Raises:
            ConfigError: the config is not valid.
        """
        text = dump_yaml(dict(config))
        for key in ("path: text.txt", "teacher: teacher"):
            text = text.replace(key, key.replace(": ", f": {self.folder}/"))
        path.write_text(text)
        return load_config(path).config

    def bytes_of(self, config: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Return the files that the run writes.

        Raises:
            ConfigError: the config is not valid.
        """
        name = dump_yaml(dict(config))
        if name not in self.made:
            directory = self.folder / f"run-{len(self.made)}"
            loaded = self.load(config, directory.with_suffix(".yaml"))
            train(loaded, RunRequest(directory=directory, backend="torch", reporter=Silent))
            last = sorted((directory / "checkpoints").glob("step-*"))[-1]
            files = (
                last / "model.safetensors",
                last / "state.safetensors",
                directory / "metrics.jsonl",
            )
            self.made[name] = tuple(file.read_bytes() for file in files)
        return self.made[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("every_option")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    write_teacher(folder / "teacher")
    return Runs(folder)


def write_teacher(folder: Path) -> None:
    """Write a randomly initialised float decoder as a stage, for the phases that learn from a
    teacher.
    """
    torch.manual_seed(1)
    model = Decoder(float_config(DecoderConfig(architecture="llama", **TEACHER)), 256)
    write_float_model(folder, model.config, 256, {"kind": "bytes"}, [neutral_tensors(model)])


@pytest.fixture(autouse=True)
def _backends_are_forgotten() -> Iterator[None]:
    yield
    reset_backends()


@pytest.mark.parametrize(("kind", "found", "path", "field"), list(cases()))
def test_an_option_changes_the_run_or_is_refused(
    kind: str, found: Any, path: tuple[str, ...], field: attrs.Attribute[Any], runs: Runs
) -> None:
    reason = reason_to_skip(found, path)
    if reason:
        pytest.skip(reason)
    config, where = context(kind, found)
    tried = candidates(path, field)
    assert tried, (
        f"no value is known for {path}: add one to VALUES, or the reason why it changes nothing to "
        f"BY_NATURE"
    )
    for key, given in COMPANIONS_OF.get(f"{found.spec.name}.{path[-1]}", {}).items():
        config = placed(config, where, (key,), given)
    if path[0] == "schedule" and len(path) > 1:
        config = placed(config, where, ("schedule", "batches"), 3)
    same = []
    before = runs.bytes_of(config)
    for value in tried:
        try:
            if runs.bytes_of(placed(config, where, path, value)) != before:
                return
            same.append(value)
        except ConfigError:
            continue
    assert not same, f"{'.'.join(path)}: {same} train as the default does, byte for byte"


# --- numbers


def is_numeric(t: Any) -> bool:
    """Return whether an option of type ``t`` can hold a number, also in a list or mapping."""
    return t in (int, float) or any(is_numeric(arm) for arm in get_args(t))


def numeric_options(cls: type[Any]) -> dict[tuple[str, ...], attrs.Attribute[Any]]:
    return {path: field for path, field in options(cls) if is_numeric(field.type)}


def in_shape(t: Any, number: float) -> Any:
    """Return ``number``, or a list or mapping with it, as an option of type ``t`` wants it."""
    arms = (t, *get_args(t))
    if int in arms or float in arms:
        return number
    for arm in arms:
        if shape_of(arm) == "list":
            return [number]
        if shape_of(arm) == "mapping":
            return {0 if get_args(arm)[0] is int else "head": number}
    return number


def every_component() -> Iterator[Any]:
    """Yield every config class that a component has, and that of runs."""
    yield pytest.param(RunConfig, id="run")
    for kind in KINDS:
        if kind.kind in ("command", "starter"):
            continue
        for found in registered(kind.kind):
            cls = options_class(found.spec)
            if cls is not None and numeric_options(cls):
                yield pytest.param(cls, id=f"{kind.kind}-{found.spec.name}")


@pytest.mark.parametrize("cls", list(every_component()))
def test_an_extreme_number_is_refused_where_it_stands_or_valid(cls: type[Any]) -> None:
    registry = manager().registry
    lists = {
        str(field.alias)
        for field in config_fields(cls)
        if "list" in map(shape_of, (field.type, *get_args(field.type)))
    }
    missing = {str(fault) for fault in structure_with_faults(cls, Document({}), registry)[1]}
    for path, field in numeric_options(cls).items():
        for number in (*EXTREMES, *LIMITS):
            data = placed({}, (), path, in_shape(field.type, number))
            if len(path) > 1 and path[0] in lists:
                data = {path[0]: [data[path[0]]]}
            _, faults = structure_with_faults(cls, Document(data), registry)
            own = [text for text in map(str, faults) if text not in missing]
            own = [text for text in own if not text.endswith("is required")]
            named = any(path[-1] in text or str(number) in text for text in own)
            assert named or not own, (path, number, own)
            if not math.isfinite(number) or number == 1e39:
                assert own, f"{'.'.join(path)}: {number} is valid"


class StopsAfterTwoSteps(Silent):
    """Interrupts the run as a user does."""

    def step(self, done: int, metrics: Mapping[str, Any], log: bool) -> None:
        super().step(done, metrics, log)
        if done >= 2:
            os.kill(os.getpid(), signal.SIGINT)


def trained_options() -> Iterator[Any]:
    """Yield every numeric option that a run can have, with that run and the option's place."""
    plain, _ = context("optimizer", manager().registry.get("optimizer", "adamw"))
    places: list[tuple[str, type[Any], dict[str, Any], tuple[str | int, ...]]] = [
        ("run", RunConfig, plain, ())
    ]
    for kind in ("optimizer", "masking", "phase", "model", "data", "tracker", "check", "policy"):
        for found in registered(kind):
            cls = options_class(found.spec)
            if cls is None or (kind == "phase" and found.spec.name in IN_A_PIPELINE):
                continue
            if kind in ("tracker", "check"):
                config = placed(plain, (), (f"{kind}s",), [{"name": found.spec.name}])
                where: tuple[str | int, ...] = (f"{kind}s", 0)
            elif kind == "policy":
                config = placed(plain, ("phases", 0), ("policy",), {"name": found.spec.name})
                where = ("phases", 0, "policy")
            else:
                config, where = context(kind, found)
            if config.get(kind) != {}:
                places.append((f"{kind}-{found.spec.name}", cls, config, where))
    for name, cls, section, where in places:
        for path, field in numeric_options(cls).items():
            config = section
            for key, given in COMPANIONS_OF.get(f"{name.partition('-')[2]}.{path[-1]}", {}).items():
                config = placed(config, where, (key,), given)
            if path[0] == "schedule" and len(path) > 1:
                config = placed(config, where, ("schedule", "batches"), 3)
            case = f"{name}-{'.'.join(path)}"
            marks = () if crc32(case.encode()) % TRAINED == 0 else pytest.mark.extended
            yield pytest.param(config, where, path, field, id=case, marks=marks)


@pytest.mark.parametrize(("config", "where", "path", "field"), list(trained_options()))
def test_a_valid_extreme_number_trains_and_resumes_or_says_why_not(
    config: dict[str, Any],
    where: tuple[str | int, ...],
    path: tuple[str, ...],
    field: attrs.Attribute[Any],
    runs: Runs,
    tmp_path: Path,
) -> None:
    for serial, number in enumerate((*EXTREMES, *LIMITS)):
        directory = tmp_path / f"run-{serial}"
        changed = placed(config, where, path, in_shape(field.type, number))
        try:
            loaded = runs.load(changed, directory.with_suffix(".yaml"))
        except ConfigError:
            continue
        request = RunRequest(directory=directory, backend="torch", reporter=StopsAfterTwoSteps)
        try:
            train(loaded, request)
        except Interrupted:
            pass
        except ArbError:
            # Weights went out of range, or there is not enough memory or data.
            continue
        try:
            train(loaded, attrs.evolve(request, resume="auto"))
        except (Interrupted, Diverged):
            continue
        except CheckpointError as error:
            if "not finite; no checkpoint is written" not in error.what:
                raise
