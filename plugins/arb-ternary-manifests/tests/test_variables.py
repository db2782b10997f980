from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary_manifests.variables import substitute, with_variant


def replaced(text: str, variant: str = "") -> Any:
    document = read_yaml(text, "m.yaml")
    if variant:
        document = with_variant(document, variant)
    document, _ = substitute(document)
    assert document.faults == ()
    return document.data


def faults(text: str, variant: str = "") -> list[tuple[str, str]]:
    document = read_yaml(text, "m.yaml")
    document, _ = substitute(with_variant(document, variant) if variant else document)
    return [(str(document.origins[fault.path]), fault.message) for fault in document.faults]


@pytest.mark.parametrize(
    "value", ["7", "0.5", "true", "null", "[1, a]", "{a: 1}", "text", "'7'", "1e-3"]
)
def test_whole_text_becomes_the_value_with_its_type(value: str) -> None:
    data = replaced(f"vars: {{x: {value}}}\ny: ${{x}}\nz: [{{a: '${{ x }}'}}]\n")
    expected = read_yaml(value, "").data
    assert data["y"] == expected
    assert type(data["y"]) is type(expected)
    assert data["z"] == [{"a": expected}]


@pytest.mark.parametrize(
    ("value", "text"),
    [("7", "7"), ("true", "true"), ("null", "null"), ("0.5", "0.5"), ("a b", "a b"), ("'7'", "7")],
)
def test_value_inside_text_is_written_as_yaml(value: str, text: str) -> None:
    data = replaced(f"vars: {{x: {value}, y: end}}\nz: a-${{x}}-${{y}}\n")
    assert data["z"] == f"a-{text}-end"


def test_variables_can_use_others_in_any_order() -> None:
    data = replaced(
        "vars: {a: '${b}', b: '${c}', c: 4, d: 'w${a}', e: ['${c}']}\nx: ${a}\ny: ${d}\nz: ${e}\n"
    )
    assert (data["x"], data["y"], data["z"]) == (4, "w4", [4])


def test_other_dollar_signs_are_kept() -> None:
    assert replaced("x: costs $5 {a}\n") == {"x": "costs $5 {a}"}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "vars: {width: 1}\nx:\n  y: ${widht}\n",
            "m.yaml:3",
            "vars has no variable 'widht'; did you mean 'width'?",
        ),
        ("vars: {a: 1}\nx: ${zebra}\n", "m.yaml:2", "vars has no variable 'zebra'; there are a"),
        ("x: ${a}\n", "m.yaml:1", "vars has no variable 'a'; there are none"),
        ("x: ${}\n", "m.yaml:1", "vars has no variable ''; there are none"),
        ("x: a${b\n", "m.yaml:1", "'a${b' has a ${ without its }"),
        (
            "vars:\n  a: [1]\nx: w${a}\n",
            "m.yaml:3",
            "${a} is a list, which cannot be written into a text",
        ),
        ("vars:\n  a: ${a}\n", "m.yaml:2", "a circle of variables: a -> a"),
        (
            "vars:\n  a: ${b}\n  b: ${c}\n  c: [{x: '${a}'}]\n",
            "m.yaml:4",
            "a circle of variables: a -> b -> c -> a",
        ),
    ],
)
def test_fault_has_the_line_of_the_use(text: str, line: str, message: str) -> None:
    assert faults(text) == [(line, message)]


def test_every_fault_is_listed() -> None:
    assert [line for line, _ in faults("x: ${a}\ny: ${b}\n")] == ["m.yaml:1", "m.yaml:2"]


def test_variant_changes_values() -> None:
    text = (
        "vars: {a: 1, b: 2}\nvariants: {quick: {a: 10}, slow: {b: '${a}'}}\nx: ['${a}', '${b}']\n"
    )
    assert replaced(text)["x"] == [1, 2]
    assert replaced(text, "quick")["x"] == [10, 2]
    assert replaced(text, "slow")["x"] == [1, 1]


def test_faults_in_variants() -> None:
    text = "vars: {steps: 1}\nvariants:\n  quick:\n    step: 2\nx: ${steps}\n"
    assert faults(text, "quick") == [
        ("m.yaml:4", "vars has no variable 'step'; did you mean 'steps'?")
    ]
    text = "vars: {a: 1}\nvariants:\n  quick:\n    a: ${b}\nx: ${a}\n"
    assert faults(text, "quick") == [("m.yaml:4", "vars has no variable 'b'; there are a")]


def test_unused_variables_are_listed() -> None:
    _, unused = substitute(read_yaml("vars: {a: 1, b: '${c}', c: 2}\nx: ${a}\n", ""))
    assert unused == ("b",)
