"""The hook surface is frozen, documented, and complete; so are the environment variables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import arb_ternary
from arb_ternary import environment, specs
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.surface import HOOKS, NOUNS, OBSERVATION, REGISTRATION, describe_hooks

SOURCE = Path(arb_ternary.__file__).parent
WORKSPACE = Path(__file__).parents[3]
#: Core's modules and those of every other distribution of this repository: they share one list of variables.
MODULES = sorted(
    path
    for folder in (SOURCE, *WORKSPACE.glob("plugins/*/src"), *WORKSPACE.glob("backends/*/src"))
    for path in folder.rglob("*.py")
)


def test_the_hook_surface_is_the_published_one():
    assert [f"{hook.name}({', '.join(hook.arguments)})" for hook in describe_hooks()] == [
        "arb_register_backends()",
        "arb_register_optimizers()",
        "arb_register_masking()",
        "arb_register_phases()",
        "arb_register_models()",
        "arb_register_datasets()",
        "arb_register_trackers()",
        "arb_register_exporters()",
        "arb_register_commands()",
        "arb_register_checks()",
        "arb_register_recipes()",
        "arb_plugin_info()",
        "arb_select_backend(request, candidates)",
        "arb_run_start(context)",
        "arb_phase_start(context, phase)",
        "arb_step_end(context, step, metrics)",
        "arb_eval_end(context, step, metrics)",
        "arb_checkpoint_save(context, state)",
        "arb_checkpoint_load(context, state)",
        "arb_phase_end(context, phase)",
        "arb_run_end(context, status)",
    ]


@pytest.mark.parametrize("hook", describe_hooks(), ids=lambda hook: hook.name)
def test_every_hook_says_when_it_is_called_and_what_none_means(hook):
    assert "Called" in hook.documentation, "when, and how often"
    assert "None" in hook.documentation or "Results are ignored" in hook.documentation


def test_every_hook_is_collected_at_load_or_shown_or_called_on_a_run():
    assert [*REGISTRATION, "arb_plugin_info", *OBSERVATION] == list(HOOKS)


def test_every_kind_of_component_has_a_hook_and_a_noun():
    kinds = {spec.kind for spec in vars(specs).values() if isinstance(spec, type) and issubclass(spec, specs.Spec)}

    assert kinds - {"component"} == {spec.kind for spec in REGISTRATION.values()} == set(NOUNS)


# --- environment variables -------------------------------------------------------------------------------------------


def calls_and_attributes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(path.parts[-3:]))
def test_variables_are_read_in_one_module_only(path):
    if path == SOURCE / "environment.py" or "templates" in path.parts:
        return
    for node in calls_and_attributes(path):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in ("environ", "environb", "getenv"), f"{path}:{node.lineno}: use arb_ternary.environment"


def names_read() -> dict[str, Path]:
    found = {}
    for path in MODULES:
        constants = {}
        for node in calls_and_attributes(path):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                constants.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
        for node in calls_and_attributes(path):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            name = argument.value if isinstance(argument, ast.Constant) else constants.get(getattr(argument, "id", ""))
            if called in ("read", "read_flag", "read_integer", "read_names") and isinstance(name, str):
                found[name] = path
    return found


def test_every_variable_that_is_read_is_listed_and_every_listed_one_is_read():
    assert set(names_read()) == {variable.name for variable in environment.VARIABLES}


def test_every_variable_is_described():
    for variable in environment.VARIABLES:
        assert len(variable.summary) > 20, variable.name


def test_an_unset_variable_has_its_default(monkeypatch):
    monkeypatch.delenv("ARB_TERNARY_DECODE_CACHE_MB", raising=False)

    assert environment.read("ARB_TERNARY_DECODE_CACHE_MB") == "256"
    assert environment.read_integer("ARB_TERNARY_DECODE_CACHE_MB") == 256
    with pytest.raises(KeyError):
        environment.read("HOME")


@pytest.mark.parametrize(("text", "value"), [("1", True), (" On ", True), ("0", False), ("", False), ("false", False)])
def test_a_switch_is_read_leniently(monkeypatch, text, value):
    monkeypatch.setenv("ARB_TERNARY_STRICT", text)

    assert environment.read_flag("ARB_TERNARY_STRICT") is value


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch):
    monkeypatch.setenv("ARB_TERNARY_STRICT", "maybe")

    with pytest.raises(UsageProblem, match="ARB_TERNARY_STRICT: 'maybe' is neither on nor off"):
        environment.read_flag("ARB_TERNARY_STRICT")


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "²"])
def test_a_number_that_is_none_is_an_error(monkeypatch, text):
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", text)

    with pytest.raises(UsageProblem, match=r"ARB_TERNARY_DECODE_CACHE_MB: .* is not a whole number of 0 or more"):
        environment.read_integer("ARB_TERNARY_DECODE_CACHE_MB")


def test_an_empty_number_is_the_default(monkeypatch):
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", " ")

    assert environment.read_integer("ARB_TERNARY_DECODE_CACHE_MB") == 256


def test_variables_that_look_like_ours_and_are_not_are_found(monkeypatch):
    monkeypatch.setenv("ARB_PLUGIN", "x")
    monkeypatch.setenv("ARB_SOMETHING_ELSE_ENTIRELY", "x")

    assert environment.unrecognised() == {"ARB_PLUGIN": "ARB_PLUGINS", "ARB_SOMETHING_ELSE_ENTIRELY": None}
