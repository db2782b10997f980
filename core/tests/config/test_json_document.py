"""JSON with lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.config.errors import InvalidConfig
from arb_ternary.config.json_document import read_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


def paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    """The path of every value inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} | {below for key, item in items for below in paths(item, (*path, key))}


@given(PLAIN, st.sampled_from([None, 0, "\t"]), st.booleans())
def test_json_is_read_as_the_json_library_does(value: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = read_json(text, "demo.json")
    assert document.data == json.loads(text)
    assert set(document.origins) == paths(document.data)
    assert not document.faults


def test_every_value_has_its_line() -> None:
    document = read_json(
        '\n{\n\t"a" :\n {"b": 1, "\\u00e9": "x\\"]"},\n\t"c": [1,\n\t{}], "d": [],\n"e": -1.5e3}\n', "demo.json"
    )
    assert {path: origin.order for path, origin in document.origins.items()} == {
        (): 2,
        ("a",): 3,
        ("a", "b"): 4,
        ("a", "é"): 4,
        ("c",): 5,
        ("c", 0): 5,
        ("c", 1): 6,
        ("d",): 6,
        ("e",): 7,
    }


def test_a_key_that_stands_twice_is_a_fault_with_both_lines() -> None:
    (fault,) = read_json('{\n"a": {"b": 1},\n"c": 2,\n"a": {"b": 3}\n}', "demo.json").faults
    assert fault.path == ("a",)
    assert (str(fault.origin), fault.message) == ("demo.json:4", "the key is here twice; the first is in line 2")


def test_bad_syntax_is_located() -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_json('{"a": 1,\n "b" 2}', "demo.json")
    assert caught.value.what == "demo.json:2: not valid JSON: Expecting ':' delimiter"
