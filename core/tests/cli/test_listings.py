"""``arb plugins``, ``arb backends`` and ``arb doctor``: the same facts as text and as JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

from arb_ternary import __version__, hookspecs
from arb_ternary.cli.main import main
from arb_ternary.cli.output import print_table
from arb_ternary.plugins.hooks import specified_in

HEAD = """
from arb_ternary import hookimpl
from arb_ternary.specs import BackendSpec, MaskingSpec
ARB_API_VERSION = (1, 0)
"""
GOOD = (
    HEAD
    + """
@hookimpl
def arb_register_masking():
    return [MaskingSpec(name="stripes", target="fake_good:build", summary="every other position")]

@hookimpl
def arb_plugin_info():
    return {"homepage": "https://example.org"}
"""
)
#: A hook of its own.
SAMPLING = (
    HEAD
    + """
@hookimpl
def arb_register_hooks():
    import types
    from arb_ternary.hookspecs import hookspec

    def arb_register_orders():
        "Register orders of rows."

    module = types.ModuleType("fake_hookspecs")
    module.arb_register_orders = hookspec(arb_register_orders)
    return [module]
"""
)
OLD_BACKEND = (
    HEAD
    + """
from arb_ternary.backends.protocol import ProbeResult

@hookimpl
def arb_register_backends():
    return [BackendSpec(name="old", target="fake_old:build", probe="fake_old:probe")]

def probe(device):
    return ProbeResult(False, "the kernel library is too old")
"""
)


def printed(capsys, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def as_json(capsys, *arguments: str, code: int = 0):
    return json.loads(printed(capsys, *arguments, "--json", code=code))


# --- plugins


def test_the_list_of_plugins_shows_status_and_reason(install_plugin, monkeypatch, capsys):
    install_plugin("good", GOOD)
    install_plugin("broken", "raise RuntimeError('half written')")
    install_plugin("unwanted", GOOD)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "unwanted")

    lines = printed(capsys, "plugins", "list").splitlines()

    assert lines[0].split() == ["plugin", "status", "distribution", "version", "provides"]
    assert [line for line in lines if not line.startswith("builtin")][1:] == [
        "broken    failed    arb-ternary-broken    1.0      RuntimeError: half written",
        "good      loaded    arb-ternary-good      1.0      masking stripes",
        "unwanted  disabled  arb-ternary-unwanted  1.0      ARB_PLUGINS_DISABLED lists it",
    ]
    rows = {row["name"]: row for row in as_json(capsys, "plugins", "list")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "builtin": "loaded",
        "broken": "failed",
        "good": "loaded",
        "unwanted": "disabled",
    }
    assert rows["good"] == {
        "name": "good",
        "distribution": "arb-ternary-good",
        "version": "1.0",
        "module": "fake_good",
        "status": "loaded",
        "reason": "",
        "components": [{"kind": "masking", "name": "stripes"}],
    }


def test_a_plugin_is_shown_with_its_facts_hooks_and_components(install_plugin, capsys):
    install_plugin("good", GOOD)

    assert printed(capsys, "plugins", "show", "good") == (
        "good: loaded\n"
        "  distribution  arb-ternary-good 1.0\n"
        "  module        fake_good\n"
        "  homepage      https://example.org\n"
        "  hooks         arb_register_masking, arb_plugin_info\n"
        "  masking       stripes: every other position [fake_good:build]\n"
    )
    (facts,) = as_json(capsys, "plugins", "show", "good")
    assert facts["info"] == {"homepage": "https://example.org"}
    assert facts["hooks"] == ["arb_register_masking", "arb_plugin_info"]
    assert facts["components"] == [
        {
            "kind": "masking",
            "name": "stripes",
            "summary": "every other position",
            "target": "fake_good:build",
            "config": None,
        }
    ]


def test_a_plugin_that_failed_is_shown_with_its_reason(install_plugin, capsys):
    install_plugin("broken", "raise RuntimeError('half written')")

    assert printed(capsys, "plugins", "show", "broken") == (
        "broken: failed: RuntimeError: half written\n"
        "  distribution  arb-ternary-broken 1.0\n"
        "  module        fake_broken\n"
        "  hooks         none\n"
    )


def test_facts_that_are_not_text_are_an_error_of_the_plugin(install_plugin, capsys):
    install_plugin("good", GOOD.replace('{"homepage": "https://example.org"}', "{'size': 3}"))

    assert main(["plugins", "show", "good"]) == 1
    assert capsys.readouterr().err == (
        "error: plugin 'good': arb_plugin_info returned {'size': 3}, which is not text by name\n"
    )


def test_an_unknown_plugin_gets_the_nearest_name(install_plugin, capsys):
    install_plugin("good", GOOD)

    assert main(["plugins", "show", "goof"]) == 2
    assert capsys.readouterr().err == (
        "error: no plugin is called 'goof'\n  did you mean 'good'?\n  installed: builtin, good\n"
    )


def test_every_hook_is_listed_with_its_arguments(install_plugin, capsys):
    install_plugin("sampling", SAMPLING)
    text = printed(capsys, "plugins", "hooks")
    rows = as_json(capsys, "plugins", "hooks")

    known = [*specified_in(hookspecs)]
    of_runs = [hook.__name__ for hook in hookspecs.RUN_HOOKS]
    added = ["arb_register_orders"]
    assert [row["name"] for row in rows] == [*known[: -len(of_runs)], *added, *of_runs]
    assert all(row["signature"] in text for row in rows)
    assert {row["name"]: row["group"] for row in rows} == {
        **dict.fromkeys((*known, *added), "registration"),
        "arb_plugin_info": "information",
        **dict.fromkeys(of_runs, "observer"),
        "arb_select_backend": "selection",
    }


def test_printed_signatures_pass_a_strict_type_checker(
    install_plugin, capsys, tmp_path, monkeypatch
):
    api = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPY_CONFIG_FILE_DIR", "")  # mypy sets it
    install_plugin("good", GOOD)
    signatures = [row["signature"] for row in as_json(capsys, "plugins", "hooks")]
    assert (
        "arb_step_end(context: RunContext, step: int, metrics: Mapping[str, Any]) -> None"
        in signatures
    )
    assert main(["plugins", "hooks", "--help"]) == 0
    text = capsys.readouterr().out
    modules = re.findall(r"arb_ternary\.[\w.]*\w|collections\.abc|\btypes\b|typing", text)
    imports = set()
    for name in set(re.findall(r"\b[A-Z]\w+", " ".join(signatures))) - {"None"}:
        module = next(each for each in reversed(modules) if hasattr(import_module(each), name))
        imports.add(f"from {module} import {name}")
    functions = [f"def {signature}:\n    raise NotImplementedError" for signature in signatures]
    file = tmp_path / "hooks.py"
    file.write_text("\n".join([*sorted(imports), *functions, ""]), encoding="utf-8")
    options = (
        "--config-file=",
        "--strict",
        "--follow-imports=skip",
        "--cache-dir",
        str(tmp_path / "cache"),
    )
    printed, _, code = api.run([*options, str(file)])
    assert code == 0, printed


# --- backends


def test_the_list_of_backends_shows_every_status(install_plugin, capsys):
    install_plugin("old", OLD_BACKEND)

    assert {
        row["name"]: (row["status"], row["reason"]) for row in as_json(capsys, "backends", "list")
    } == {
        "old": ("unusable", "the kernel library is too old"),
        "torch": ("usable", f"torch {version('torch')}"),
        "cpu": ("not installed", "pip install arb-ternary-cpu"),
        "triton": ("not installed", "pip install arb-ternary-triton"),
    }
    text = printed(capsys, "backends", "list", "--device", "xla")
    assert (
        "torch    unusable       0         arb-ternary-core    cpu cuda mps  it serves cpu, cuda, "
        "mps\n" in text
    )


def test_the_choice_of_a_backend_is_explained(install_plugin, capsys):
    install_plugin("old", OLD_BACKEND)

    facts = as_json(capsys, "backends", "explain")

    assert facts == {
        "device": "cpu",
        "request": "auto",
        "source": "default",
        "backend": "torch",
        "reason": f"highest priority (0), torch {version('torch')}",
        "rejected": [{"name": "old", "reason": "the kernel library is too old"}],
        "capabilities": facts["capabilities"],
        "fallback_ops": [],
    }
    assert printed(capsys, "backends", "explain").splitlines()[:3] == [
        f"torch on cpu: highest priority (0), torch {version('torch')}",
        "  request       auto (default)",
        "  not           old: the kernel library is too old",
    ]


def test_fallback_ops_of_a_backend_are_listed(install_plugin, capsys):
    source = OLD_BACKEND.replace("False", "True") + (
        "from arb_ternary.backends.protocol import REQUIRED_OPS\n"
        "class Old:\n    name = 'old'\n    capabilities = {'fused_votes'}\n"
        "    kernels = dict.fromkeys(REQUIRED_OPS, print)\n"
        "def build():\n    return Old()\n"
    )
    install_plugin("old", source)

    facts = as_json(capsys, "backends", "explain", "--backend", "old")

    assert (facts["source"], facts["capabilities"]) == ("command line", ["fused_votes"])
    assert {"embedding", "embedding_votes", "rms_norm_quantize"} <= set(facts["fallback_ops"])


def test_an_explanation_of_an_unknown_backend_is_the_error(install_plugin, capsys):
    assert main(["backends", "explain", "--backend", "tritn"]) == 2
    assert capsys.readouterr().err.startswith("error: command line: no backend is called 'tritn'\n")


# --- doctor


@pytest.mark.parametrize(
    ("written", "setting", "pages"),
    [
        ("always [madvise] never\n", "madvise", "huge"),
        ("[always] madvise never\n", "always", "huge"),
        ("always madvise [never]\n", "never", "ordinary"),
        (None, "none", "ordinary"),
    ],
)
def test_doctor_says_on_which_pages_models_lie(
    written, setting, pages, monkeypatch, tmp_path, capsys
):
    file = tmp_path / "enabled"
    if written is not None:
        file.write_text(written)
    monkeypatch.setattr("arb_ternary.cli.doctor._HUGE_PAGES", file)
    assert as_json(capsys, "doctor")["huge_pages"] == setting
    line = f"pages     {setting}: a loaded model lies on {pages} pages\n"
    assert line in printed(capsys, "doctor")


def test_doctor_reports_what_there_is(install_plugin, monkeypatch, capsys):
    install_plugin("good", GOOD)
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    monkeypatch.setenv("ARB_PLUGIN", "good")

    facts = as_json(capsys, "doctor")

    assert facts["arb"] == {"version": __version__, "plugin_interface": "1.0"}
    assert facts["python"]["executable"] == sys.executable
    assert facts["torch"]["threads"] == 1
    assert facts["distributions"]["torch"] == version("torch")
    assert {row["name"]: row["status"] for row in facts["plugins"]} == {
        "builtin": "loaded",
        "good": "loaded",
    }
    assert facts["backend"] == {
        "request": "torch",
        "source": "ARB_TERNARY_BACKEND",
        "device": "cpu",
        "name": "torch",
        "reason": f"torch {version('torch')}",
        "rejected": [],
    }
    assert facts["environment"] == {"ARB_TERNARY_BACKEND": "torch"}
    assert facts["unrecognised_variables"] == {"ARB_PLUGIN": "ARB_PLUGINS"}
    assert facts["disk"]["total_bytes"] >= facts["disk"]["free_bytes"] > 0
    assert facts["problems"] == []

    text = printed(capsys, "doctor")
    assert f"arb       {__version__} (plugins 1.0)\n" in text
    assert (
        f"backend   torch on cpu, 'torch' from ARB_TERNARY_BACKEND: torch {version('torch')}\n"
        in text
    )
    assert "ARB_TERNARY_BACKEND  torch\n" in text
    assert "ARB_PLUGIN is not a variable of arb; did you mean ARB_PLUGINS?\n" in text


def test_doctor_explains_a_misspelt_backend_and_exits_with_2(install_plugin, monkeypatch, capsys):
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "tritn")

    assert main(["doctor"]) == 2

    report = capsys.readouterr()
    assert report.err == (
        "error: ARB_TERNARY_BACKEND: no backend is called 'tritn'\n"
        "  did you mean 'triton'?\n"
        "  available: torch\n"
        "  not installed: cpu (pip install arb-ternary-cpu)\n"
        "  not installed: triton (pip install arb-ternary-triton)\n"
    )
    assert "builtin  loaded" in report.out, "the report comes out all the same"


def test_doctor_exits_with_3_for_a_missing_backend(install_plugin, monkeypatch, capsys):
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "triton")

    facts = as_json(capsys, "doctor", code=3)

    assert facts["problems"] == [
        {
            "what": "ARB_TERNARY_BACKEND: backend 'triton' is not installed",
            "hint": "pip install arb-ternary-triton",
        }
    ]


def test_doctor_exits_with_3_for_a_failed_named_plugin(install_plugin, monkeypatch, capsys):
    install_plugin("broken", "raise RuntimeError('half written')")
    assert main(["doctor"]) == 0, "it is merely installed"
    monkeypatch.setenv("ARB_PLUGINS", "broken")

    assert main(["doctor"]) == 3
    assert capsys.readouterr().err.endswith(
        "error: ARB_PLUGINS: plugin 'broken' (arb-ternary-broken 1.0) is not loaded: RuntimeError: "
        "half written\n"
    )


def test_doctor_reports_a_torch_that_cannot_be_imported(install_plugin, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["doctor"]) == 3

    report = capsys.readouterr()
    assert "torch     cannot be imported\n" in report.out
    assert report.err.startswith("error: torch cannot be imported: ModuleNotFoundError")


def test_the_report_is_markdown_with_every_distribution(install_plugin, capsys):
    text = printed(capsys, "doctor", "--report")

    assert text.startswith("```text\narb ")
    assert text.endswith("\n```\n")
    assert f"{version('pytest')}\n" in text
    assert "\npytest " not in printed(capsys, "doctor")


# --- tables


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_aligned_plain_text_in_a_pipe(capsys):
    print_table(("name", "size"), [("a", 1), ("longer", None)])

    assert capsys.readouterr().out == "name    size\na       1\nlonger\n"


def test_a_table_without_rows_still_has_its_head(capsys):
    print_table(("name", "size"), [])

    assert capsys.readouterr().out == "name  size\n"


def test_a_table_on_a_terminal_shows_markup_as_text(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    print_table(("name", "why"), [("a", "[bold]not markup[/bold]")])

    assert "[bold]not markup[/bold]" in terminal.getvalue()
    assert "─" in terminal.getvalue()
