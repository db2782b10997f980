"""Overrides from the command line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.config.errors import find_origin, show_path
from arb_ternary.config.overrides import apply_overrides, parse_path
from arb_ternary.config.yaml_document import read_yaml

TEXT = """\
seed: 1
optimizer: adam
model: {name: decoder, width: 64}
phases:
  - {name: standard, steps: 10}
  - warmup
limits: {1: 0.5, a: 2}
empty:
"""


def changed(*overrides: str) -> Any:
    document = apply_overrides(read_yaml(TEXT, "demo.yaml"), overrides)
    assert not document.faults
    return document.data


def faults(*overrides: str) -> list[str]:
    document = apply_overrides(read_yaml(TEXT, "demo.yaml"), overrides)
    return [
        f"{fault.origin}: {show_path(fault.path)}: {fault.message}" for fault in document.faults
    ]


@pytest.mark.parametrize(
    ("override", "get", "expected"),
    [
        ("seed=2", lambda d: d["seed"], 2),
        ("seed = 2", lambda d: d["seed"], 2),
        ("model.width=1e-3", lambda d: d["model"], {"name": "decoder", "width": 0.001}),
        ("model.depth=no", lambda d: d["model"]["depth"], "no"),
        (
            "model={name: other, width: [1, 2]}",
            lambda d: d["model"],
            {"name": "other", "width": [1, 2]},
        ),
        ("phases.0.steps=3", lambda d: d["phases"][0]["steps"], 3),
        ("phases[0].steps=3", lambda d: d["phases"][0]["steps"], 3),
        ("phases.1=x", lambda d: d["phases"][1], "x"),
        ("phases.1.steps=3", lambda d: d["phases"][1], {"name": "warmup", "steps": 3}),
        ("optimizer.lr=0.5", lambda d: d["optimizer"], {"name": "adam", "lr": 0.5}),
        (
            "optimizer.inner.lr=0.5",
            lambda d: d["optimizer"],
            {"name": "adam", "inner": {"lr": 0.5}},
        ),
        ("new.deep.key=x=y", lambda d: d["new"], {"deep": {"key": "x=y"}}),
        ("empty.key=1", lambda d: d["empty"], {"key": 1}),
        ('model."blocks.0"=1', lambda d: d["model"]["blocks.0"], 1),
        ("limits.1=0.25", lambda d: d["limits"], {1: 0.25, "a": 2}),
        ("model.width=", lambda d: d["model"]["width"], None),
    ],
)
def test_an_override_changes_one_value(override: str, get: Any, expected: Any) -> None:
    assert get(changed(override)) == expected


def test_later_overrides_win() -> None:
    assert changed("seed=2", "seed=3")["seed"] == 3


def test_the_document_itself_stays_as_it_is() -> None:
    document = read_yaml(TEXT, "demo.yaml")
    before = read_yaml(TEXT, "demo.yaml")
    apply_overrides(document, ["optimizer.lr=1", "phases.0.steps=2"])
    assert (document.data, document.origins) == (before.data, before.origins)


def test_an_overridden_value_says_where_it_comes_from() -> None:
    document = apply_overrides(
        read_yaml(TEXT, "demo.yaml"), ["optimizer.lr=1", "model={a: {b: 1}}"]
    )
    assert str(document.origins["optimizer", "name"]) == "demo.yaml:2"
    assert str(document.origins["optimizer", "lr"]) == "-o optimizer.lr=1"
    assert str(document.origins["model", "a", "b"]) == "-o model={a: {b: 1}}"
    assert ("model", "width") not in document.origins


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "-o seed: : an override is written path=value"),
        ("=3", "-o =3: : an override is written path=value"),
        (".seed=3", "-o .seed=3: : an override is written path=value"),
        ("a..b=3", "-o a..b=3: : an override is written path=value"),
        (
            "seed=[1",
            "-o seed=[1: : the value is not valid YAML: expected ',' or ']', but got '<stream "
            "end>'",
        ),
        ("phases.2.steps=1", "-o phases.2.steps=1: phases[2]: phases has 2 items, numbered from 0"),
        ("phases.first=1", "-o phases.first=1: phases.first: a list has items by number, from 0"),
        ("seed.x=1", "-o seed.x=1: seed: 1 has no key 'x'"),
    ],
)
def test_an_override_that_leads_nowhere_is_a_fault(override: str, message: str) -> None:
    assert faults(override) == [message]


def test_every_faulty_override_is_reported() -> None:
    assert len(faults("seed", "seed.x=1", "seed=3")) == 2


def test_overrides_leave_a_value_that_is_no_mapping() -> None:
    document = apply_overrides(read_yaml("[1, 2]", "demo.yaml"), ["a=1"])
    assert document.data == [1, 2]


PARTS = st.lists(
    st.integers(0, 99)
    | st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters='"'), min_size=1
    ),
    min_size=1,
    max_size=5,
).filter(lambda parts: isinstance(parts[0], str))


@given(PARTS)
def test_a_path_reads_back_as_it_is_shown(parts: list[str | int]) -> None:
    assert parse_path(show_path(tuple(parts))) == tuple(parts)


def test_a_value_without_origin_has_that_of_its_container() -> None:
    origins = read_yaml("a: {b: 1}\n", "demo.yaml").origins
    assert find_origin(origins, ("a", "b", "c", 0)) == origins["a", "b"]
    assert find_origin({}, ("a",)) is None
