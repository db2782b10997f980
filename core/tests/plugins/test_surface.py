"""Hooks and environment variables of the core are frozen, documented and complete."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import arb_ternary
from arb_ternary import environment, hookspecs, specs
from arb_ternary.environment import DECODE_CACHE_MB, STRICT, VARIABLES
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.hooks import group_of, specified_in
from arb_ternary.plugins.manager import manager

SOURCE = Path(arb_ternary.__file__).parent
HOOKS = tuple(specified_in(hookspecs).values())
MODULES = sorted(SOURCE.rglob("*.py"))


def test_hooks_are_grouped_by_their_use():
    selecting, *observing = hookspecs.RUN_HOOKS
    assert group_of(selecting) == "selection"
    assert {group_of(hook) for hook in observing} == {"observer"}
    assert [hook.__name__ for hook in HOOKS if group_of(hook) == "information"] == [
        "arb_plugin_info"
    ]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_says_when_it_is_called_and_what_none_means(hook):
    documentation = " ".join(hook.__doc__.split())
    assert "Called" in documentation, "when, and how often"
    assert "None" in documentation or "result is ignored" in documentation


def test_every_kind_has_a_written_hook():
    assert [kind.hook for kind in specs.KINDS] == [
        hook.__name__ for hook in HOOKS[: len(specs.KINDS)]
    ]


def test_every_kind_of_the_core_is_registered_by_the_core(install_plugin):
    stated = [
        spec
        for spec in vars(specs).values()
        if isinstance(spec, type) and issubclass(spec, specs.Spec)
    ]

    assert set(stated) - {specs.Spec} == set(specs.KINDS)
    assert list(manager().registry.kinds.values()) == list(specs.KINDS)


# --- environment variables


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(path.parts[-3:]))
def test_variables_are_read_in_one_module_only(path):
    if path == SOURCE / "environment.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        assert name not in ("environ", "environb", "getenv"), (
            f"{path}:{node.lineno}: use arb_ternary.environment"
        )


def test_every_variable_of_the_core_is_listed_and_read():
    stated = {
        name for name, value in vars(environment).items() if isinstance(value, environment.Variable)
    }
    used = {
        node.id if isinstance(node, ast.Name) else node.attr
        for path in MODULES
        if path != SOURCE / "environment.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.Attribute)
    }

    assert {getattr(environment, name) for name in stated} == set(VARIABLES)
    assert stated <= used


def test_a_plugin_declares_the_variables_that_it_reads(install_plugin):
    install_plugin(
        "tuned",
        """
from arb_ternary import hookimpl
from arb_ternary.environment import Variable
from arb_ternary.specs import MaskingSpec
ARB_API_VERSION = (1, 0)
TUNE = Variable("ARB_TUNED_HOW", "well", "how the stripes are tuned, in words")
@hookimpl
def arb_register_masking():
    return [MaskingSpec(name=name, target="m:b", variables=[TUNE]) for name in ("stripes", "dots")]
""",
    )

    assert [variable.name for variable in manager().variables] == [
        *(variable.name for variable in VARIABLES),
        "ARB_TUNED_HOW",
    ]


def test_every_variable_is_described():
    for variable in VARIABLES:
        assert len(variable.summary) > 20, variable.name


def test_an_unset_variable_has_its_default(monkeypatch):
    monkeypatch.delenv("ARB_TERNARY_DECODE_CACHE_MB", raising=False)

    assert DECODE_CACHE_MB.read() == "256"
    assert DECODE_CACHE_MB.integer() == 256


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), (" On ", True), ("0", False), ("", False), ("false", False)]
)
def test_a_switch_is_read_leniently(monkeypatch, text, value):
    monkeypatch.setenv("ARB_TERNARY_STRICT", text)

    assert STRICT.flag() is value


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch):
    monkeypatch.setenv("ARB_TERNARY_STRICT", "maybe")

    with pytest.raises(UsageProblem, match="ARB_TERNARY_STRICT: 'maybe' is neither on nor off"):
        STRICT.flag()


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "²", str(2**31), "9" * 5000])
def test_a_number_that_is_none_is_an_error(monkeypatch, text):
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", text)

    with pytest.raises(
        UsageProblem,
        match=r"ARB_TERNARY_DECODE_CACHE_MB: .* is not a whole number from 0 to 2147483647",
    ):
        DECODE_CACHE_MB.integer()


def test_an_empty_number_is_the_default(monkeypatch):
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", " ")

    assert DECODE_CACHE_MB.integer() == 256


def test_variables_that_look_like_ours_and_are_not_are_found(monkeypatch):
    monkeypatch.setenv("ARB_PLUGIN", "x")
    monkeypatch.setenv("ARB_SOMETHING_ELSE_ENTIRELY", "x")

    assert environment.unrecognised(VARIABLES) == {
        "ARB_PLUGIN": "ARB_PLUGINS",
        "ARB_SOMETHING_ELSE_ENTIRELY": None,
    }
