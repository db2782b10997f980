"""TOML with lines."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.config.errors import InvalidConfig
from arb_ternary.config.locate_toml import locate_keys
from arb_ternary.config.toml_document import read_toml

DOCUMENT = r'''# a comment
name = "demo" # = [x]
seed = 3
checkpoint.every = 10
checkpoint . "keep" = 2

[model]
name = 'decoder'
"quoted \"key\".with.dots" = """
several = "lines"
[not.a.table]"""
literal = QQQ
x = 1QQQ
sizes = [
  1, # one
  [2,
   3],
  { a = 1, b = { c = 2 } },
]
when = 2026-01-01T00:00:00Z

[[phases]]
name = "standard"
steps = 1_000
  [phases.inner]
  x = 1
  [[phases.parts]]
  y = 2
  [[phases.parts]]
  y = 3

[[phases]]
name = "other"
[phases.inner]
x = 2
'''.replace("QQQ", "'" * 3)


def test_every_key_has_its_line() -> None:
    tomllib.loads(DOCUMENT)
    assert locate_keys(DOCUMENT) == {
        ("name",): 2,
        ("seed",): 3,
        ("checkpoint",): 4,
        ("checkpoint", "every"): 4,
        ("checkpoint", "keep"): 5,
        ("model",): 7,
        ("model", "name"): 8,
        ("model", 'quoted "key".with.dots'): 9,
        ("model", "literal"): 12,
        ("model", "sizes"): 14,
        ("model", "sizes", 0): 15,
        ("model", "sizes", 1): 16,
        ("model", "sizes", 1, 0): 16,
        ("model", "sizes", 1, 1): 17,
        ("model", "sizes", 2): 18,
        ("model", "sizes", 2, "a"): 18,
        ("model", "sizes", 2, "b"): 18,
        ("model", "sizes", 2, "b", "c"): 18,
        ("model", "when"): 20,
        ("phases",): 22,
        ("phases", 0): 22,
        ("phases", 0, "name"): 23,
        ("phases", 0, "steps"): 24,
        ("phases", 0, "inner"): 25,
        ("phases", 0, "inner", "x"): 26,
        ("phases", 0, "parts"): 27,
        ("phases", 0, "parts", 0): 27,
        ("phases", 0, "parts", 0, "y"): 28,
        ("phases", 0, "parts", 1): 29,
        ("phases", 0, "parts", 1, "y"): 30,
        ("phases", 1): 32,
        ("phases", 1, "name"): 33,
        ("phases", 1, "inner"): 34,
        ("phases", 1, "inner", "x"): 35,
    }


def _paths(value: object, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} | {below for key, item in items for below in _paths(item, (*path, key))}


KEYS = st.sampled_from(["a", "b-c", "1", '"x y"', "'q.r'", r'"\u00e9"'])
ATOMS = st.sampled_from(
    ["1", "-1.5e3", "true", "inf", '"a]b}#"', "'''x\ny'''", r'"""p"q\" ""r"""""', "1979-05-27", '""', "''", '""""""']
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ # c\n" + ",\n".join(items) + "]")
        | st.dictionaries(KEYS, inner, max_size=2).map(
            lambda items: "{" + ", ".join(f"{key} = {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_the_scanner_finds_exactly_the_keys_that_tomllib_finds(items: dict[str, str]) -> None:
    lines = [f"{key} = {value}" for key, value in items.items()]
    text = "\n".join(lines) + "\n[table]\nlast = 1\n"
    found = locate_keys(text)
    assert set(found) | {()} == _paths(tomllib.loads(text))
    assert found["table", "last"] == text.count("\n")


def test_bad_syntax_is_located() -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_toml("a = 1\nb 2\n", "demo.toml")
    assert caught.value.what == "demo.toml:2: not valid TOML: Expected '=' after a key in a key/value pair"


def test_a_key_that_stands_twice_is_bad_syntax() -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_toml("a = 1\na = 2\n", "demo.toml")
    assert caught.value.what.startswith("demo.toml:2: not valid TOML: Cannot overwrite a value")


def test_an_unfinished_document_is_located_at_its_end() -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_toml("a = 1\nb = [1,\n", "demo.toml")
    assert caught.value.what.startswith("demo.toml:3: not valid TOML: ")
