"""The JSON Schema accepts what loading accepts, and refuses what a schema can refuse."""

from __future__ import annotations

import json
from typing import Any

import arb_config_test_components as components
import pytest
from jsonschema import Draft202012Validator

from arb_ternary.config.fields import to_plain
from arb_ternary.config.schema import json_schema
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ConfigError

#: Components whose config class breaks a rule of config classes.
FAULTY = {"reserved", "unresolvable", "odd_type", "no_class", "not_attrs"}
REGISTRY = components.FakeRegistry([each for each in components.SPECS if each.name not in FAULTY])
SCHEMA = json_schema(components.Study, REGISTRY)


def base(**changes: Any) -> dict[str, Any]:
    return {
        "data": "letters",
        "model": {"name": "everything"},
        "optimizer": "adam",
        "phases": [{"name": "standard", "steps": 1}],
        **changes,
    }


def model(**options: Any) -> dict[str, Any]:
    return base(model={"name": "everything", **options})


GOOD = [
    base(),
    base(
        optimizer={
            "name": "wrapper",
            "inner": {"name": "wrapper", "limits": {"3": 0.5}},
            "others": ["sgd"],
        }
    ),
    base(name="a.b", seed=3, saving={"every": 0}),
    base(phases=[{"name": "standard", "steps": 1, "lr": None, "share": 1}]),
    model(
        window="all",
        either=None,
        maybe={"size": 2},
        table={"x": {}},
        rows=[{}],
        shape={"size": 1},
        anything=[1],
    ),
    model(window=3, ranks={"a": 1}, path="x", level=3),
]
BAD = [
    {},
    base(extra=1),
    base(model="stackk"),
    base(model={"width": 3}),
    base(model={"name": "stack", "widht": 3}),
    base(model={"name": "stack", "width": 0}),
    base(model={"name": "stack", "width": "3"}),
    base(optimizer={"name": "sgd", "lr": 1}),
    base(optimizer={"name": "adam", "betas": [1]}),
    base(optimizer={"name": "adam", "given": ["x"]}),
    base(optimizer={"name": "wrapper", "inner": {"name": "adam", "rl": 1}}),
    base(optimizer={"name": "wrapper", "limits": {"x": 1}}),
    base(name="much too long"),
    base(seed=-1),
    base(phases=[]),
    base(phases=["standard"]),
    base(phases=[{"name": "standard", "steps": 0}]),
    base(phases=[{"name": "standard", "steps": 1, "lr": 0}]),
    base(phases=[{"name": "standard", "steps": 1, "share": 1.5}]),
    base(phases=[{"name": "standard", "steps": 1, "every": -1}]),
    base(saving={"keep": 0}),
    model(window="some"),
    model(level=4),
    model(words="a"),
    model(ranks={"a": "x"}),
    model(flag="yes"),
    model(shape=3),
]


def accepts(data: Any) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(data)


def loads(data: Any) -> bool:
    try:
        structure(components.Study, Document(data), REGISTRY)
    except ConfigError:
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("data", GOOD, ids=range(len(GOOD)))
def test_the_schema_accepts_what_loads(data: Any) -> None:
    assert loads(data)
    assert accepts(data)


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_the_schema_refuses_what_does_not_load(data: Any) -> None:
    assert not loads(data)
    assert not accepts(data)


@pytest.mark.parametrize("data", GOOD, ids=range(len(GOOD)))
def test_the_schema_accepts_a_resolved_config(data: Any) -> None:
    plain = to_plain(structure(components.Study, Document(data), REGISTRY))
    assert accepts(json.loads(json.dumps(plain)))


def test_options_have_their_help_and_their_default() -> None:
    adam = SCHEMA["$defs"]["optimizer.adam"]
    assert adam["properties"]["name"] == {"const": "adam"}
    assert adam["properties"]["lr"] == {
        "type": "number",
        "allOf": [{"exclusiveMinimum": 0}],
        "description": "learning rate",
        "default": 0.001,
    }
    assert adam["description"] == "the adam"
    assert SCHEMA["properties"]["masking"]["default"] == "shift"
    assert "default" not in SCHEMA["properties"]["data"]


def test_a_bare_name_needs_a_component_without_required_options() -> None:
    assert SCHEMA["$defs"]["phase"]["anyOf"][0] == {"enum": []}
    assert SCHEMA["$defs"]["model"]["anyOf"][0] == {"enum": ["bare", "everything", "stack"]}


def test_options_that_cannot_be_imported_accept_anything() -> None:
    lost = SCHEMA["$defs"]["optimizer.lost"]
    assert "no_such_module" in lost["description"]
    assert accepts(base(optimizer={"name": "lost", "anything": 1}))
