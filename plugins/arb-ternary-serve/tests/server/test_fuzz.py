"""Bodies that the description of the API allows, and bodies near those, never break the server."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary_serve.openapi import description

Running = Any
PATHS = ("/v1/completions", "/v1/chat/completions")
#: Half of a surrogate pair is a character of JSON, and of no text.
NAMES = st.text(st.characters(exclude_categories=()), max_size=5)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def body_schema(path: str) -> dict[str, Any]:
    content = description()["paths"][path]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Draw values that a schema allows."""
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    types = schema.get("type", "object")
    names = [types] if isinstance(types, str) else types
    return st.one_of(*(_of_type(name, schema) for name in names))


def _of_type(name: str, schema: Any) -> st.SearchStrategy[Any]:
    if name == "null":
        return st.none()
    if name == "boolean":
        return st.booleans()
    if name == "integer":
        return st.integers(schema.get("minimum", -5), min(schema.get("maximum", 300), 300))
    if name == "number":
        return st.floats(0, schema.get("maximum", 2), exclude_min="exclusiveMinimum" in schema)
    if name == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=12)
    if name == "array":
        most = min(schema.get("maxItems", 3), 3)
        items = values(schema["items"])
        return st.lists(items, min_size=schema.get("minItems", 0), max_size=most)
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    return st.fixed_dictionaries(
        {key: values(properties[key]) for key in required},
        optional={key: values(each) for key, each in properties.items() if key not in required},
    )


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and a body that its schema allows, or one that differs from it somewhere."""
    path = draw(st.sampled_from(PATHS))
    body = draw(values(body_schema(path)))
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=2)):
        body[name] = draw(ANYTHING)
    if draw(st.integers(0, 9)) == 9:
        body[draw(NAMES)] = draw(ANYTHING)
    # Tests wait for what is drawn.
    limit = {PATHS[0]: "max_tokens", PATHS[1]: "max_completion_tokens"}[path]
    if body.get(limit) is None or isinstance(body[limit], int):
        body[limit] = draw(st.integers(0, 3))
    if isinstance(body.get("n"), int):
        body["n"] = draw(st.integers(0, 3))
    return path, body


@settings(max_examples=100)
@given(case=bodies(), named=st.booleans())
def test_no_body_breaks_the_server(both: Running, case: tuple[str, Any], named: bool) -> None:
    path, body = case
    if named:
        body["model"] = "chat"
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    response = both.client.post(path, content=content, headers=headers)
    assert response.status_code < 500, content
    if response.status_code != 200:
        schema = description()["components"]["schemas"]["Error"]
        jsonschema.validate(response.json(), schema)
    elif not body.get("stream"):
        jsonschema.validate(json.loads(content), body_schema(path))
        assert response.json()["choices"]


def test_the_description_is_served(both: Running) -> None:
    served = both.client.get("/openapi.json").json()
    assert served == json.loads(json.dumps(description()))
    for path in PATHS:
        jsonschema.Draft202012Validator.check_schema(body_schema(path))
    for path, methods in served["paths"].items():
        if "get" in methods and "{" not in path:
            assert both.client.get(path).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_what_the_description_refuses_is_refused(both: Running, path: str) -> None:
    for name in body_schema(path)["required"]:
        response = both.client.post(path, json={"temperature": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
