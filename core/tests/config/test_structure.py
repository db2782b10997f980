"""Strict structuring of plain values into config classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import arb_config_test_components as components
import pytest
import torch

from arb_ternary.config.choice import ModelChoice, OptimizerChoice
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ComponentError, ConfigError, EnvironmentProblem


@pytest.fixture
def faults(registry: Any) -> Any:
    """The lines of the error that structuring ``data`` into ``cls`` gives."""

    def run(cls: type[Any], data: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            structure(cls, Document(data), registry)
        return [str(fault) for fault in caught.value.faults]

    return run


def everything(registry: Any, **options: Any) -> Any:
    return structure(components.Everything, Document(options), registry)


def test_an_empty_mapping_gives_the_defaults(registry: Any) -> None:
    assert everything(registry) == components.Everything()


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("text", "", ""),
        ("flag", True, True),
        ("count", -3, -3),
        ("number", 3, 3.0),
        ("number", 1e-3, 0.001),
        ("path", "a/b", Path("a/b")),
        ("window", 7, 7),
        ("window", "all", "all"),
        ("either", 3, 3),
        ("either", 3.0, 3.0),
        ("either", None, None),
        ("words", ["a", "b"], ["a", "b"]),
        ("names", ["a"], ("a",)),
        ("ranks", {"blocks.0": 4}, {"blocks.0": 4}),
        ("maybe", None, None),
        ("anything", {"a": [1, "x", None]}, {"a": [1, "x", None]}),
    ],
)
def test_a_value_of_the_right_type_is_kept(
    registry: Any, option: str, value: Any, expected: Any
) -> None:
    found = getattr(everything(registry, **{option: value}), option)
    assert found == expected
    assert type(found) is type(expected)


def test_nested_classes_are_structured_wherever_they_stand(registry: Any) -> None:
    small = {"size": 2}
    large = {"size": 4, "weight": 0.25}
    found = everything(
        registry, nested=small, maybe=large, table={"a": small}, rows=[small, large], shape=large
    )
    inner_small = components.Inner(size=2)
    inner_large = components.Inner(size=4, weight=0.25)
    assert (found.nested, found.maybe, found.table) == (
        inner_small,
        inner_large,
        {"a": inner_small},
    )
    assert (found.rows, found.shape) == ((inner_small, inner_large), inner_large)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("text", 1, "text: must be text, not 1"),
        ("text", None, "text: must be text, not null"),
        ("text", True, "text: must be text, not true"),
        ("flag", 1, "flag: must be true or false, not 1"),
        ("flag", "yes", "flag: must be true or false, not 'yes' (text)"),
        ("count", "1", "count: must be a whole number, not '1' (text)"),
        ("count", True, "count: must be a whole number, not true"),
        ("count", 1.0, "count: must be a whole number, not 1.0"),
        ("number", "1e-3", "number: must be a number, not '1e-3' (text)"),
        ("number", False, "number: must be a number, not false"),
        ("number", 10**400, "number: must be a number that float32 holds, not one of 401 digits"),
        ("path", 3, "path: must be a path, not 3"),
        (
            "window",
            "al",
            "window: must be a whole number or 'all', not 'al' (text); did you mean 'all'?",
        ),
        ("window", 1.5, "window: must be a whole number or 'all', not 1.5"),
        ("either", "x", "either: must be a number, a whole number or null, not 'x' (text)"),
        ("words", "a", "words: must be a list, not 'a' (text)"),
        ("words", ["a", 2], "words[1]: must be text, not 2"),
        ("ranks", ["a"], "ranks: must be a mapping, not a list"),
        ("ranks", {"a.b": "x"}, "ranks.\"a.b\": must be a whole number, not 'x' (text)"),
        ("nested", "x", "nested: must be a mapping, not 'x' (text)"),
        ("nested", {"siez": 1}, "nested.siez: unknown key; did you mean 'size'?"),
        ("maybe", {"size": "1"}, "maybe.size: must be a whole number, not '1' (text)"),
        ("table", {"a": {"size": None}}, "table.a.size: must be a whole number, not null"),
        ("rows", [{}, {"size": 1.5}], "rows[1].size: must be a whole number, not 1.5"),
        ("shape", {"size": "1"}, "shape.size: must be a whole number, not '1' (text)"),
        ("shape", 3, "shape: must be text or a mapping, not 3"),
        ("level", 4, "level: must be one of 1, 2, 3, not 4"),
        ("nested", {"size": 3}, "nested.size: must be in (1, 2, 4) (got 3)"),
        ("xyz", 3, None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(
    faults: Any, option: str, value: Any, message: str | None
) -> None:
    found = faults(components.Everything, {option: value})
    if message is None:
        message = (
            "xyz: unknown key; the keys here are anything, count, either, flag, level, maybe, "
            "names, nested, number, path, ranks, rows, shape, table, text, window, words"
        )
    assert found == [message]


def test_a_tuple_of_fixed_length_has_that_length(faults: Any) -> None:
    assert faults(components.Adam, {"betas": [0.9]}) == ["betas: must have 2 items, not 1"]
    assert faults(components.Adam, {"betas": [0.9, "x"]}) == [
        "betas[1]: must be a number, not 'x' (text)"
    ]


def test_number_keys_may_be_text_as_those_of_overrides_are(registry: Any, faults: Any) -> None:
    found = structure(
        components.Wrapper, Document({"limits": {"10": 0.5, 20: 1}, "inner": "sgd"}), registry
    )
    assert found.limits == {10: 0.5, 20: 1.0}
    assert faults(components.Wrapper, {"limits": {"x": 1}}) == [
        "limits.x: must be a whole number, not 'x' (text)"
    ]


def test_all_faults_are_reported_at_once_validators_included(faults: Any) -> None:
    data = {"lr": -1, "share": 2, "every": "x", "stesp": 3}
    assert faults(components.Standard, data) == [
        "stesp: unknown key; did you mean 'steps'?",
        "steps: is required",
        "lr: must be greater than 0, not -1.0",
        "share: must be between 0 and 1, not 2.0",
        "every: must be a whole number, not 'x' (text)",
    ]


@pytest.mark.parametrize(
    ("word", "meant"), [("learning_rate", "lr"), ("Learning_Rate", "lr"), ("max_steps", "steps")]
)
def test_a_key_of_another_program_is_explained(word: str, meant: str, faults: Any) -> None:
    assert (
        faults(components.Standard, {"steps": 1, word: 1})[0]
        == f"{word}: unknown key; did you mean '{meant}'?"
    )


def test_a_fault_of_a_class_is_located_at_the_option_it_names(faults: Any) -> None:
    assert faults(components.Stack, {"width": 65}) == [
        "width: must be a multiple of 'heads'; 65 is not a multiple of 4"
    ]


def test_a_validator_of_two_options_runs_when_both_exist(
    faults: Any,
) -> None:
    assert faults(components.Span, {"start": 3, "end": 2}) == [
        "end: must not be before 'start', which is 3"
    ]
    assert faults(components.Span, {"start": -1, "end": -2}) == [
        "start: must be 0 or greater, not -1"
    ]


def test_an_internal_error_of_a_validator_is_no_fault(
    registry: Any,
) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        structure(components.Span, Document({"start": 13, "end": 14}), registry)


def test_a_converter_sees_the_value_before_the_validator_does(registry: Any, faults: Any) -> None:
    assert structure(
        components.Span, Document({"start": 1, "end": 2, "steps": [2, 1]}), registry
    ).steps == (1, 2)
    assert faults(components.Span, {"start": 1, "end": 2, "steps": [2, -1]}) == [
        "steps: must be numbers from 0, in order, not (-1, 2)"
    ]


# --- components


def test_a_bare_name_and_a_mapping_choose_the_same_component(registry: Any) -> None:
    alone = structure(OptimizerChoice, Document("adam"), registry)
    mapping = structure(OptimizerChoice, Document({"name": "adam"}), registry)
    assert alone == mapping
    assert (alone.name, alone.options, alone.given) == ("adam", components.Adam(), frozenset())


def test_a_choice_knows_which_options_the_user_wrote(registry: Any) -> None:
    choice = structure(OptimizerChoice, Document({"name": "adam", "lr": 1e-3}), registry)
    assert choice.given == {"lr"}
    assert choice.options == components.Adam()


def test_components_nest_to_any_depth(registry: Any) -> None:
    data = {
        "name": "wrapper",
        "inner": {"name": "wrapper", "inner": {"name": "adam", "lr": 0.5}},
        "others": ["sgd", {"name": "adam", "mode": "amsgrad"}],
    }
    choice = structure(OptimizerChoice, Document(data), registry)
    assert choice.options.inner.options.inner.options.lr == 0.5
    assert [other.name for other in choice.options.others] == ["sgd", "adam"]


def test_a_component_that_is_not_named_is_the_default_one(registry: Any) -> None:
    choice = structure(OptimizerChoice, Document("wrapper"), registry)
    assert choice.options.inner.name == "adam"
    assert choice.given == frozenset()


def test_build_calls_the_factory_with_the_options_first(registry: Any) -> None:
    choice = structure(OptimizerChoice, Document({"name": "adam", "lr": 0.5}), registry)
    assert choice.build("parameters") == (components.Adam(lr=0.5), "parameters")


def test_a_component_without_options_is_built_with_none(registry: Any) -> None:
    assert structure(OptimizerChoice, Document("sgd"), registry).build("parameters") == (
        None,
        "parameters",
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "sgd", "lr": 1}, "lr: unknown key; optimizer 'sgd' takes no options"),
        ({"name": "adm"}, "name: no optimizer is called 'adm'; did you mean 'adam'?"),
        ("adm", "no optimizer is called 'adm'; did you mean 'adam'?"),
        ({"name": 3}, "name: must be the name of the optimizer, not 3"),
        (3, "must be the name of an optimizer, or a mapping with its name and options, not 3"),
        (
            {"lr": 1},
            "needs the 'name' of the optimizer: "
            "adam, lost, no_class, not_attrs, odd_type, reserved, sgd, unresolvable, wrapper",
        ),
        (
            {"name": "adam", "lr": 1.0, "given": ["mode"]},
            "given[0]: 'mode' is not among the options here",
        ),
        ({"name": "adam", "given": 3}, "given: must be a list, not 3"),
        (
            {"name": "wrapper", "inner": {"name": "adam", "mod": 1}},
            "inner.mod: unknown key; did you mean 'mode'?",
        ),
        (
            {"name": "wrapper", "others": ["adm"]},
            "others[0]: no optimizer is called 'adm'; did you mean 'adam'?",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_explained(faults: Any, data: Any, message: str) -> None:
    found = faults(OptimizerChoice, data)
    assert message in found


def test_a_missing_component_is_an_environment_problem(registry: Any) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        structure(OptimizerChoice, Document("absent"), registry)
    assert caught.value.exit_code == 3
    assert (
        str(caught.value) == "optimizer 'absent' is not installed\npip install arb-ternary-absent"
    )


def test_a_config_fault_wins_over_an_absent_component(faults: Any) -> None:
    data = {"name": "wrapper", "inner": "absent", "limitz": {}}
    assert faults(OptimizerChoice, data) == [
        "limitz: unknown key; did you mean 'limits'?",
        "inner: optimizer 'absent' is not installed",
    ]


def test_a_config_class_that_fails_to_import_is_explained(registry: Any) -> None:
    with pytest.raises(
        EnvironmentProblem,
        match="the config class no_such_module:Config cannot be imported: ModuleNotFoundError: No "
        "module",
    ):
        structure(OptimizerChoice, Document("lost"), registry)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_class", "does not exist"),
        ("not_attrs", "is not an attrs class"),
        ("reserved", "has an option 'name', which is reserved"),
        ("unresolvable", "the type of an option does not resolve: name 'Missing' is not defined"),
    ],
)
def test_a_faulty_config_class_is_the_plugins_error(registry: Any, name: str, message: str) -> None:
    with pytest.raises(ComponentError, match=message):
        structure(OptimizerChoice, Document(name), registry)


def test_an_option_of_an_unsupported_type_is_the_plugins_error(registry: Any) -> None:
    with pytest.raises(ComponentError, match="a config class cannot have an option of type set"):
        structure(OptimizerChoice, Document({"name": "odd_type", "value": [1]}), registry)


def test_build_says_which_target_cannot_be_imported(registry: Any) -> None:
    spec = type(registry.get("model", "bare").spec)(name="bare", target="no_such_module:build")
    with pytest.raises(
        EnvironmentProblem, match="model 'bare': no_such_module:build cannot be imported"
    ):
        ModelChoice("bare", None, frozenset(), spec).build(84)
    spec = type(spec)(name="bare", target="os:no_such_function")
    with pytest.raises(ComponentError, match="model 'bare': os:no_such_function does not exist"):
        ModelChoice("bare", None, frozenset(), spec).build(84)


@pytest.mark.parametrize(
    "source",
    [
        "{}\ndef build(options, size): return size",
        "def build(options, size): {}; return size",
    ],
    ids=["import", "factory"],
)
def test_a_component_that_changes_the_default_dtype_is_refused(
    source: str, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = "import torch; torch.set_default_dtype(torch.float64)"
    (tmp_path / "fake_wide.py").write_text(source.format(change))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_wide", raising=False)
    spec = type(registry.get("model", "bare").spec)(name="wide", target="fake_wide:build")
    with pytest.raises(ComponentError, match="model 'wide': fake_wide:build changes torch's def"):
        ModelChoice("wide", None, frozenset(), spec).build(84)
    assert torch.get_default_dtype() == torch.float32
