"""YAML by the rules of 1.2, with lines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.config.yaml_document import dump_inline, dump_yaml, parse_yaml_value, read_yaml
from arb_ternary.errors import ConfigError

TEXT = st.text(
    st.characters(
        codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff\u2028\u2029"
    )
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)
#: Text that some YAML reads as something else.
TRICKY = [
    "\x85",
    "a\u2028b",
    "yes",
    "no",
    "on",
    "off",
    "1e-3",
    "0x1f",
    "0o17",
    "010",
    "1_000",
    "~",
    "null",
    "true",
    "2026-01-01",
    "1:30",
    "<<",
    "",
    " ",
]


def data(text: str) -> Any:
    document = read_yaml(text, "demo.yaml")
    assert not document.faults
    return document.data


def faults(text: str) -> list[str]:
    return [f"{fault.origin}: {fault.message}" for fault in read_yaml(text, "demo.yaml").faults]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("-1", -1),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.5", 1.5),
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("12:30:45", "12:30:45"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("1e", "1e"),
        ("0x", "0x"),
        ("-", [None]),
        ("", None),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(text: str, expected: Any) -> None:
    found = data(text)
    assert found == expected
    assert type(found) is type(expected)


def test_not_a_number_is_read() -> None:
    assert math.isnan(data(".nan"))


@given(PLAIN)
def test_what_is_dumped_reads_back_equal(value: Any) -> None:
    assert data(dump_yaml(value)) == value
    assert parse_yaml_value(dump_inline(value)) == value


@pytest.mark.parametrize("text", TRICKY)
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert data(dump_yaml({text: [text]})) == {text: [text]}
    assert "\n" not in dump_inline({text: [text]})


def test_every_value_has_the_line_of_its_key() -> None:
    text = "a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y: 3\n      z: 4\n"
    document = read_yaml(text, "demo.yaml")
    assert {path: str(origin) for path, origin in document.origins.items()} == {
        (): "demo.yaml:1",
        ("a",): "demo.yaml:1",
        ("b",): "demo.yaml:2",
        ("b", "c"): "demo.yaml:3",
        ("b", "d"): "demo.yaml:4",
        ("b", "d", 0): "demo.yaml:5",
        ("b", "d", 1): "demo.yaml:6",
        ("b", "d", 1, "y"): "demo.yaml:6",
        ("b", "d", 1, "z"): "demo.yaml:7",
    }


def test_merge_keys_mean_what_pyyaml_says_they_mean() -> None:
    text = (
        "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\none:\n  <<: *b\n  x: 5\nboth: {<<: [*m, "
        "*b], w: 6}\n"
    )
    assert data(text) == yaml.safe_load(text)


def test_a_merged_key_has_the_line_where_it_is_written() -> None:
    document = read_yaml("base: &b\n  x: {deep: 1}\n  y: 2\none:\n  <<: *b\n  y: 3\n", "demo.yaml")
    assert document.origins["one", "x", "deep"].order == 2
    assert document.origins["one", "y"].order == 6


def test_an_alias_gives_the_anchors_value() -> None:
    assert data("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", ["demo.yaml:3: the key is here twice; the first is in line 1"]),
        ("a: {b: 1, b: 2}\n", ["demo.yaml:1: the key is here twice; the first is in line 1"]),
        ("a: 1\nb: &b\n  - *b\n", ["demo.yaml:2: an alias to a value that contains it"]),
        ("a: &a\n  <<: *a\n", ["demo.yaml:1: an alias to a value that contains it"]),
        ("a:\n  <<: 3\n", ["demo.yaml:2: a merge key (<<) needs a mapping, or a list of mappings"]),
        (
            "a: &a {x: 1, x: 2}\nb: {<<: *a}\n",
            ["demo.yaml:1: the key is here twice; the first is in line 1"],
        ),
        ("a: 1\n1.5: 2\n", ["demo.yaml:2: a key must be text or a whole number"]),
        ("? [a]\n: 2\n", ["demo.yaml:1: a key must be text or a whole number"]),
        (
            "a: !!python/name:os.system x\n",
            ["demo.yaml:1: the tag tag:yaml.org,2002:python/name:os.system is not allowed"],
        ),
        ("a: !thing {b: 1}\n", ["demo.yaml:1: the tag !thing is not allowed"]),
        ("a: !!set {b}\n", ["demo.yaml:1: the tag tag:yaml.org,2002:set is not allowed"]),
        ("a: !!omap [b: 1]\n", ["demo.yaml:1: the tag tag:yaml.org,2002:omap is not allowed"]),
        ("a: !!int x\n", ["demo.yaml:1: 'x' is not what its tag !!int says"]),
    ],
)
def test_yaml_that_a_config_forbids_is_a_fault_with_its_line(
    text: str, expected: list[str]
) -> None:
    assert faults(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\nb: [1, 2\nc: 3\n",
            "demo.yaml:3: not valid YAML: while parsing a flow sequence: expected ',' or ']', but "
            "got ':'",
        ),
        ("a: b: c\n", "demo.yaml:1: not valid YAML: mapping values are not allowed here"),
        (
            "a: 1\n---\nb: 2\n",
            "demo.yaml:2: not valid YAML: expected a single document in the stream: but found "
            "another document",
        ),
        ("a: *b\n", "demo.yaml:1: not valid YAML: found undefined alias 'b'"),
    ],
)
def test_bad_syntax_is_located(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "demo.yaml")
    assert caught.value.what == message


def test_an_override_value_that_is_not_yaml_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected the node content"):
        parse_yaml_value("[")
    with pytest.raises(ValueError, match="twice"):
        parse_yaml_value("{a: 1, a: 2}")
