"""Hostile YAML is refused, with file and line."""

from __future__ import annotations

import pytest

from arb_ternary.config.yaml_document import parse_yaml_value, read_yaml
from arb_ternary.errors import ConfigError


def nested(first: str, opening: str, item: str, closing: str, count: int, times: int) -> str:
    """Return ``count`` values, each of which holds the one before it several times."""
    lines = [f"a0: &a0 {first}"]
    for number in range(1, count):
        items = [item.format(place=place, before=number - 1) for place in range(times)]
        lines.append(f"a{number}: &a{number} {opening}{', '.join(items)}{closing}")
    return "\n".join(lines)


MANY = "aliases expand to more than 50,000 values"
DEEP = "aliases expand to more than 64 values inside each other"
INSIDE = "more than 64 values inside each other"
HOSTILE = {
    "lists": (nested("[x, x]", "[", "*a{before}", "]", 12, 9), MANY),
    "mappings": (nested("{x: 1}", "{", "k{place}: *a{before}", "}", 12, 9), MANY),
    "merges": (nested("{x: 1}", "{<<: [", "*a{before}", "]}", 12, 9), MANY),
    "chain of lists": (nested("[1]", "[", "*a{before}", "]", 2000, 1), DEEP),
    "chain of merges": (nested("{x: 1}", "{<<: ", "*a{before}", "}", 2000, 1), DEEP),
    "deep list": (f"a: {'[' * 500}{']' * 500}", INSIDE),
    "deep mapping": ("".join(f"{' ' * depth}k:\n" for depth in range(500)), INSIDE),
    "long list": (f"a: [{'1, ' * 20_000}]", "more than 10,000 values"),
    "large file": (f"a: [{'1, ' * 3_000_000}]", "characters are more than 524,288"),
    "escape": (r'a: "\UFFFFFFFF"', "not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_an_error_with_its_file(name: str) -> None:
    text, problem = HOSTILE[name]
    with pytest.raises(
        ConfigError, match=rf"^arb\.yaml(:\d+)?: not valid YAML: (.*{problem})?"
    ) as raised:
        read_yaml(text, "arb.yaml")
    assert problem in raised.value.what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a: {'9' * 5000}", "a whole number of 5,000 digits; at most 1,000"),
        (f"a: 0x{'f' * 5000}", "a whole number of 5,002 digits; at most 1,000"),
        (r'a: "\uD800"', "the text has half of a surrogate pair"),
    ],
)
def test_values_beyond_a_limit_are_faults_with_their_line(text: str, message: str) -> None:
    (fault,) = read_yaml(f"b: 1\n{text}", "arb.yaml").faults
    assert fault.message == message
    assert fault.origin is not None
    assert fault.origin.text == "arb.yaml:2"


def test_aliases_within_the_limits_work() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]"
    assert read_yaml(text, "arb.yaml").data == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }
    assert parse_yaml_value("9" * 1000) == int("9" * 1000)
