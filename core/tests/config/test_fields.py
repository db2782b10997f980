"""Structured configs become plain values, and plain values become equal configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arb_config_test_components as components
import attrs
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.config.fields import config_fields, default_of, is_required, leaves, to_plain
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document, dump_yaml, read_yaml

REGISTRY = components.FakeRegistry()
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32)
COUNTS = st.integers(1 - 2**31, 2**31 - 1)
WORDS = st.text("abc.1-é", min_size=1, max_size=5)


def mapping(required: dict[str, Any] | None = None, **optional: Any) -> Any:
    return st.fixed_dictionaries(required or {}, optional=optional)


def component(name: str, required: dict[str, Any] | None = None, **optional: Any) -> Any:
    return mapping({"name": st.just(name), **(required or {})}, **optional)


OPTIMIZERS = st.recursive(
    st.sampled_from(["adam", "sgd"])
    | component(
        "adam",
        lr=st.floats(1e-9, 1e3) | st.integers(1, 9),
        betas=st.lists(NUMBERS, min_size=2, max_size=2),
        mode=st.sampled_from(["plain", "amsgrad"]),
    ),
    lambda inner: component(
        "wrapper",
        inner=inner,
        others=st.lists(inner, max_size=2),
        limits=st.dictionaries(st.integers(0, 99), NUMBERS, max_size=2),
    ),
    max_leaves=4,
)
INNER = mapping(size=st.sampled_from([1, 2, 4]), weight=NUMBERS)
MODELS = (
    component(
        "stack", heads=st.sampled_from([1, 2, 4]), group_size=st.sampled_from([32, 64, "row"])
    )
    | st.just("bare")
    | component(
        "everything",
        text=WORDS,
        flag=st.booleans(),
        count=COUNTS,
        number=NUMBERS | st.integers(-9, 9),
        path=WORDS,
        window=st.just("all") | COUNTS,
        either=st.none() | COUNTS | NUMBERS,
        words=st.lists(WORDS, max_size=3),
        ranks=st.dictionaries(WORDS, COUNTS, max_size=3),
        nested=INNER,
        maybe=st.none() | INNER,
        table=st.dictionaries(WORDS, INNER, max_size=2),
        rows=st.lists(INNER, max_size=2),
        shape=WORDS | INNER,
        anything=st.none()
        | st.lists(COUNTS | WORDS, max_size=2)
        | st.dictionaries(WORDS, NUMBERS, max_size=2),
    )
)
PHASES = component(
    "standard",
    {"steps": st.integers(1, 99)},
    lr=st.none() | st.floats(1e-9, 1),
    share=st.floats(0, 1, allow_subnormal=False, width=32),
)
STUDIES = mapping(
    {
        "data": st.just("letters"),
        "model": MODELS,
        "optimizer": OPTIMIZERS,
        "phases": st.lists(PHASES, min_size=1, max_size=3),
    },
    name=st.text(max_size=8),
    seed=st.integers(0, 2**31 - 1),
    masking=st.just("shift"),
    rules=st.lists(st.just("pure"), max_size=2),
    saving=mapping(every=st.integers(0, 9), keep=st.integers(1, 9)),
)


def load(document: Document) -> components.Study:
    return structure(components.Study, document, REGISTRY)


@given(STUDIES)
def test_a_resolved_config_loads_to_an_equal_one(raw: Any) -> None:
    config = load(Document(raw))
    plain = to_plain(config)
    assert load(Document(plain)) == config
    assert load(read_yaml(dump_yaml(plain), "resolved.yaml")) == config
    assert to_plain(load(Document(plain))) == plain


@given(STUDIES)
def test_without_given_the_same_options_are_there(raw: Any) -> None:
    config = load(Document(raw))
    short = to_plain(config, given=False)
    assert "given" not in dict(leaves(short))
    again = load(Document(short))
    assert to_plain(again, given=False) == short


def holds(plain: Any, raw: Any) -> bool:
    """Whether everything in ``raw`` is in ``plain``, where a component's name may have become a
    mapping.
    """
    if isinstance(raw, dict):
        return all(key in plain and holds(plain[key], value) for key, value in raw.items())
    if isinstance(raw, list):
        return len(plain) == len(raw) and all(map(holds, plain, raw))
    return (plain["name"] if isinstance(plain, dict) else plain) == raw


@given(STUDIES)
def test_what_the_user_wrote_is_in_the_resolved_config(raw: Any) -> None:
    assert holds(to_plain(load(Document(raw)), given=False), raw)


def test_a_private_attribute_is_written_without_its_underscore() -> None:
    assert to_plain(components.Inner(weight=0.25)) == {"size": 1, "weight": 0.25}


def test_a_path_becomes_text() -> None:
    assert to_plain(components.Everything(path=Path("a") / "b"))["path"] == "a/b"


def test_leaves_are_values_without_mappings_inside() -> None:
    plain = {"a": 1, "b": [1, 2], "c": [{"d": 3}, "e"], "f": {}, "g": [], "h": {"i": None}}
    assert dict(leaves(plain)) == {
        ("a",): 1,
        ("b",): [1, 2],
        ("c", 0, "d"): 3,
        ("c", 1): "e",
        ("f",): {},
        ("g",): [],
        ("h", "i"): None,
    }


def test_a_resolved_config_keeps_what_the_user_gave() -> None:
    raw = {"name": "adam", "lr": 1e-3}
    choice = structure(components.OptimizerChoice, Document(raw), REGISTRY)
    plain = to_plain(choice)
    assert plain == {
        "name": "adam",
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "mode": "plain",
        "given": ["lr"],
    }
    assert structure(components.OptimizerChoice, Document(plain), REGISTRY).given == {"lr"}


def test_number_keys_survive_a_file() -> None:
    wrapper = structure(components.Wrapper, read_yaml("limits: {3: 0.5}", "demo.yaml"), REGISTRY)
    assert wrapper.limits == {3: 0.5}
    again = structure(
        components.Wrapper, read_yaml(dump_yaml(to_plain(wrapper)), "resolved.yaml"), REGISTRY
    )
    assert again == wrapper


def test_a_default_that_depends_on_other_options_is_not_stated() -> None:
    @define
    class Dependent:
        width: int = 3
        double: int = field()

        @double.default
        def _twice(self) -> int:
            return 2 * self.width

    assert [default_of(found) for found in config_fields(Dependent)] == [3, attrs.NOTHING]
    assert not is_required(config_fields(Dependent)[1])
