"""The loader: each plugin alone, every failure recorded, nothing half registered."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from arb_ternary import API_VERSION, hookimpl, hookspecs
from arb_ternary.errors import EnvironmentProblem, UsageProblem, render
from arb_ternary.plugins.loader import incompatibility
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary.plugins.record import PluginRecord
from arb_ternary.specs import MaskingSpec, OptimizerSpec

HEAD = """
from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, MaskingSpec, OptimizerSpec
ARB_API_VERSION = (1, 0)
"""
GOOD = (
    HEAD
    + """
@hookimpl
def arb_register_masking():
    return [MaskingSpec(name="stripes", target="fake_good:build", summary="every other position")]
"""
)
BROKEN = "import a_module_that_is_not_there\n"
TOO_NEW = GOOD.replace("(1, 0)", "(2, 0)")
OPTIMIZER = (
    HEAD
    + """
@hookimpl
def arb_register_optimizers():
    return [OptimizerSpec(name="swift", target="nowhere:build", accepts={"float"})]
"""
)
BACKEND = (
    HEAD
    + """
from arb_ternary.specs import BackendSpec
@hookimpl
def arb_register_backends():
    return [BackendSpec(name="torch", target="nowhere:build", probe="nowhere:probe")]
"""
)


def record_of(name: str, distribution: str | None = None) -> PluginRecord:
    (found,) = [
        record
        for record in manager().records
        if record.name == name and distribution in (None, record.distribution)
    ]
    return found


def test_a_good_plugin_is_loaded_and_its_component_is_found(install_plugin):
    install_plugin("good", GOOD)

    found = manager().registry.get("masking", "stripes")

    assert (found.plugin.name, found.distribution) == ("good", "arb-ternary-good")
    assert record_of("good").to_json() == {
        "name": "good",
        "distribution": "arb-ternary-good",
        "version": "1.0",
        "module": "fake_good",
        "status": "loaded",
        "reason": "",
        "components": [{"kind": "masking", "name": "stripes"}],
    }


def test_targets_are_not_imported_by_loading(install_plugin):
    install_plugin("good", GOOD.replace("fake_good:build", "fake_heavy:build")).joinpath(
        "fake_heavy.py"
    ).write_text("def build(config):\n    return 'built'\n")

    found = manager().registry.get("masking", "stripes")

    assert "fake_heavy" not in sys.modules
    assert found.load()(None) == "built"


def test_a_plugin_that_cannot_be_imported_is_one_warning(install_plugin, capsys):
    install_plugin("broken", BROKEN)
    install_plugin("good", GOOD)

    assert manager().registry.names("masking") == ("stripes",)
    assert capsys.readouterr().err == (
        "warning: plugin 'broken' (arb-ternary-broken 1.0) is not loaded: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'\n"
    )
    assert record_of("broken").status == "failed"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Odd(BaseException): ...\nraise Odd('far out')", "Odd: far out"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import sys\nsys.stdout = None", "it closes standard output"),
        (
            "import torch\ntorch.set_default_dtype(torch.float64)",
            "it changes torch's default dtype from float32 to float64",
        ),
        ("def f(:", "SyntaxError: invalid syntax (fake_bad.py, line 1)"),
        (HEAD, "it implements no hook (arb_... marked with @arb_ternary.hookimpl)"),
        (
            HEAD + "def arb_register_masking():\n    return ()\n",
            "arb_register_masking is not marked with @arb_ternary.hookimpl",
        ),
        (
            HEAD
            + "@hookimpl\ndef arb_register_masking():\n    raise ValueError('no luck\\ntoday')\n",
            "ValueError: no luck",
        ),
        (
            HEAD + "@hookimpl\ndef arb_register_masking():\n    return 3\n",
            "arb_register_masking returned 3; it must return a sequence of MaskingSpec",
        ),
        (
            HEAD + "@hookimpl\ndef arb_register_masking():\n    return ['stripes']\n",
            "arb_register_masking returned 'stripes'; every item must be a MaskingSpec",
        ),
        (
            HEAD
            + "@hookimpl\ndef arb_register_masking():\n"
            + "    return 2 * [MaskingSpec(name='stripes', target='m:build')]\n",
            "arb_register_masking returned two maskings called 'stripes'",
        ),
        (
            HEAD + "@hookimpl(wrapper=True)\ndef arb_register_masking():\n    return (yield)\n",
            "arb_register_masking is a wrapper; only hooks of a run can be wrapped",
        ),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said_in_its_record(install_plugin, source, reason):
    install_plugin("bad", source)

    assert (record_of("bad").loaded, record_of("bad").reason) == (False, reason)
    assert manager().registry.names("masking") == ()


def test_an_argument_that_the_hook_lacks_is_named(install_plugin):
    install_plugin("bad", HEAD + "@hookimpl\ndef arb_register_masking(width):\n    return ()\n")

    assert record_of("bad").status == "failed"
    assert (
        "{'width'} are declared in the hookimpl but can not be found in the hookspec"
        in record_of("bad").reason
    )


def test_a_plugin_that_fails_half_way_leaves_nothing_behind(install_plugin):
    install_plugin(
        "half",
        OPTIMIZER
        + (
            "@hookimpl\ndef arb_register_phases():\n    raise RuntimeError('after the optimizers "
            "were collected')\n"
        ),
    )

    plugins = manager()

    assert record_of("half").status == "failed"
    assert plugins.registry.find("optimizer", "swift") is None
    assert plugins.implemented_by("half") == ()


def test_an_unknown_hook_gets_the_nearest_name(install_plugin, capsys):
    install_plugin("typo", GOOD.replace("arb_register_masking", "arb_register_maskings"))

    assert record_of("typo").status == "failed"
    assert manager().registry.names("masking") == ()
    assert capsys.readouterr().err == (
        "warning: plugin 'typo' (arb-ternary-typo 1.0) is not loaded: "
        "no hook is called 'arb_register_maskings'; did you mean 'arb_register_masking'?\n"
    )


def test_an_unknown_hook_may_need_a_plugin_that_failed(install_plugin):
    install_plugin("broken", BROKEN)
    install_plugin("typo", GOOD.replace("arb_register_masking", "arb_register_maskings"))

    assert record_of("typo").reason == (
        "no hook is called 'arb_register_maskings'; it may need plugin broken, which failed to "
        "load; did you mean 'arb_register_masking'?"
    )


def test_many_plugins_that_fail_are_one_warning(install_plugin, capsys):
    for name in ("one", "three", "two"):
        install_plugin(name, BROKEN, module=f"broken_{name}")

    manager()
    assert capsys.readouterr().err == (
        "warning: 3 plugins have faults: one, three, two\n"
        "  the first: plugin 'one' (arb-ternary-one 1.0) is not loaded: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'\n"
        "  all reasons: arb plugins list\n"
    )


def test_a_hook_that_is_marked_optional_may_be_unknown(install_plugin):
    install_plugin(
        "later",
        GOOD + "@hookimpl(optionalhook=True)\ndef arb_register_samplers():\n    return ()\n",
    )

    assert record_of("later").status == "loaded"


def test_a_plugin_for_a_newer_interface_says_what_to_do(install_plugin, capsys):
    install_plugin("future", TOO_NEW)

    assert record_of("future").status == "failed"
    assert capsys.readouterr().err == (
        "warning: plugin 'future' (arb-ternary-future 1.0) is not loaded: it is written for "
        "plugin interface 2.0, this program provides 1.0; upgrade arb-ternary-core or install an "
        "older release of the plugin\n"
    )


def test_a_plugin_without_an_interface_version_is_refused(install_plugin):
    install_plugin("silent", GOOD.replace("ARB_API_VERSION = (1, 0)", ""))

    assert record_of("silent").status == "failed"
    assert record_of("silent").reason == (
        "it declares no plugin interface version; add `ARB_API_VERSION = (1, 0)` to its hook module"
    )


@pytest.mark.parametrize(
    ("declared", "provided", "fits"),
    [
        ((1, 0), (1, 0), True),
        ((1, 0), (1, 7), True),
        ((1, 7), (1, 7), True),
        ((1, 8), (1, 7), False),
        ((2, 0), (1, 7), False),
        ((1, 9), (2, 0), False),
        ("1.0", (1, 0), False),
        ((1,), (1, 0), False),
        ((True, False), (1, 0), False),
        (None, (1, 0), False),
    ],
)
def test_the_same_major_version_and_no_newer_minor_version_fits(declared, provided, fits):
    assert (incompatibility(declared, provided=provided) is None) is fits


def test_a_plugin_for_1_0_fits_this_program():
    assert incompatibility((1, 0)) is None
    assert API_VERSION[0] == 1


# --- one name twice


def test_a_name_of_two_plugins_belongs_to_neither(install_plugin, capsys):
    install_plugin("one", OPTIMIZER)
    install_plugin("two", OPTIMIZER + GOOD.removeprefix(HEAD), version="2.0")

    with pytest.raises(EnvironmentProblem) as caught:
        manager().registry.get("optimizer", "swift")

    assert render(caught.value) == (
        "error: optimizer 'swift' is provided by more than one plugin: "
        "'one' (arb-ternary-one 1.0) and 'two' (arb-ternary-two 2.0)\n"
        "  uninstall all but one of them, or disable one: ARB_PLUGINS_DISABLED=two"
    )
    assert caught.value.exit_code == 3
    assert "swift" not in manager().registry.names("optimizer")
    assert manager().registry.find("masking", "stripes") is not None, (
        "what is not in conflict works"
    )
    assert record_of("one").loaded
    assert record_of("two").loaded
    assert capsys.readouterr().err == (
        "warning: plugin 'one' (arb-ternary-one 1.0): optimizer 'swift' is also provided "
        "by "
        "plugin 'two' (arb-ternary-two 2.0); neither is used; rename it, or disable a plugin: "
        "ARB_PLUGINS_DISABLED=one\n"
        "warning: plugin 'two' (arb-ternary-two 2.0): optimizer 'swift' is also provided "
        "by "
        "plugin 'one' (arb-ternary-one 1.0); neither is used; rename it, or disable a plugin: "
        "ARB_PLUGINS_DISABLED=two\n"
    )


def test_disabling_one_of_two_rivals_ends_the_conflict(install_plugin, monkeypatch):
    install_plugin("one", OPTIMIZER)
    install_plugin("two", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "two")

    assert manager().registry.get("optimizer", "swift").plugin.name == "one"


def test_a_component_of_the_core_keeps_its_name(install_plugin, capsys):
    install_plugin("rival", BACKEND)

    assert manager().registry.get("backend", "torch").plugin.name == "builtin"
    assert record_of("builtin").reason == ""
    assert re.fullmatch(
        r"warning: plugin 'rival' \(arb-ternary-rival 1.0\): backend 'torch' is also provided by "
        r"plugin 'builtin' \(arb-ternary-core .*\), which keeps it; rename it, or disable a "
        r"plugin: ARB_PLUGINS_DISABLED=rival\n",
        capsys.readouterr().err,
    )


def test_an_announced_component_keeps_its_name(install_plugin, capsys):
    """The metapackage announces the optimizer `signgsd` of arb-ternary-signgsd."""
    source = OPTIMIZER.replace("swift", "signgsd")
    install_plugin("rival", source)
    install_plugin("signgsd", source)

    assert manager().registry.get("optimizer", "signgsd").distribution == "arb-ternary-signgsd"
    assert "signgsd" in manager().registry.names("optimizer")
    assert record_of("signgsd").reason == ""
    assert record_of("rival").loaded
    assert record_of("rival").reason == (
        "optimizer 'signgsd' is also provided by plugin 'signgsd' (arb-ternary-signgsd 1.0), which "
        "keeps it; rename it, or disable a plugin: ARB_PLUGINS_DISABLED=rival"
    )
    assert "neither is used" not in capsys.readouterr().err


def test_disabling_the_owner_of_a_name_gives_it_to_the_rival(install_plugin, monkeypatch):
    source = OPTIMIZER.replace("swift", "signgsd")
    install_plugin("rival", source)
    install_plugin("signgsd", source)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "signgsd")

    assert manager().registry.get("optimizer", "signgsd").plugin.name == "rival"


def test_a_plugin_cannot_take_a_command_of_the_core(install_plugin, capsys):
    install_plugin(
        "rival",
        HEAD
        + (
            "@hookimpl\ndef arb_register_commands():\n    return [CommandSpec(name='plugins', "
            "target='nowhere:x')]\n"
        ),
    )

    assert manager().registry.get("command", "plugins").plugin.name == "builtin"
    assert record_of("builtin").status == "loaded"
    assert ", which keeps it; rename it" in record_of("rival").reason
    assert "command 'plugins' is also provided by plugin 'builtin'" in capsys.readouterr().err


def test_plugins_that_share_a_name_are_left_out(install_plugin):
    install_plugin("same", OPTIMIZER, distribution="arb-ternary-left", module="fake_left")
    install_plugin("same", GOOD, distribution="arb-ternary-right", module="fake_right")

    left = record_of("same", "arb-ternary-left")
    right = record_of("same", "arb-ternary-right")

    assert (left.status, right.status) == ("failed", "failed")
    remedy = "rename the entry point, or uninstall one of them"
    assert left.reason == f"arb-ternary-right 1.0 has a plugin called 'same' too; {remedy}"
    assert right.reason == f"arb-ternary-left 1.0 has a plugin called 'same' too; {remedy}"


def test_a_plugin_of_an_announced_distribution_keeps_its_name(install_plugin):
    install_plugin("signgsd", OPTIMIZER, distribution="another", module="fake_another")
    install_plugin("signgsd", GOOD)

    assert record_of("signgsd", "arb-ternary-signgsd").status == "loaded"
    rival = record_of("signgsd", "another")
    assert rival.status == "failed"
    assert rival.reason.startswith("arb-ternary-signgsd 1.0 has a plugin called 'signgsd' too")


def test_the_first_of_two_equal_distributions_counts(install_plugin):
    install_plugin("good", GOOD, version="1.0")
    # The second is put first on the path, in another spelling.
    install_plugin("good", GOOD, version="2.0", distribution="Arb_Ternary.good")

    assert record_of("good").version == "2.0"
    assert manager().registry.get("masking", "stripes").distribution == "Arb_Ternary.good"


def test_damaged_entry_points_are_recorded(install_plugin):
    folder = install_plugin("odd")
    next(folder.glob("*.dist-info/entry_points.txt")).write_text(
        "[arb_ternary.plugins]\nno equals sign\n"
    )
    install_plugin("good", GOOD)

    assert record_of("arb-ternary-odd").status == "failed"
    assert record_of("arb-ternary-odd").reason.startswith("its entry points cannot be read: ")
    assert record_of("good").status == "loaded"


def test_metadata_without_a_name_does_not_keep_a_plugin_out(install_plugin):
    folder = install_plugin("good", GOOD)
    next(folder.glob("*.dist-info/METADATA")).write_text("")

    assert (record_of("good").distribution, record_of("good").version) == (
        "unnamed-distribution",
        "0",
    )
    assert record_of("good").status == "loaded"


# --- allow and block


def test_a_disabled_plugin_is_not_imported(install_plugin, monkeypatch, capsys):
    install_plugin("broken", BROKEN)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "broken")

    assert record_of("broken").status == "disabled"
    assert record_of("broken").reason == "ARB_PLUGINS_DISABLED lists it"
    assert capsys.readouterr().err == ""


def test_the_allow_list_keeps_out_what_it_does_not_list(install_plugin, monkeypatch):
    install_plugin("good", GOOD)
    install_plugin("other", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS", " good ,")

    assert {record.name: record.status for record in manager().records} == {
        "builtin": "loaded",
        "good": "loaded",
        "other": "disabled",
    }
    assert record_of("other").reason == "ARB_PLUGINS does not list it"


def test_an_empty_allow_list_leaves_only_the_core(install_plugin, monkeypatch):
    install_plugin("good", GOOD)
    monkeypatch.setenv("ARB_PLUGINS", "")

    assert manager().registry.names("masking") == ()
    assert record_of("builtin").status == "loaded"


@pytest.mark.parametrize("variable", ["ARB_PLUGINS", "ARB_PLUGINS_DISABLED"])
def test_a_listed_name_without_plugin_gets_the_nearest(install_plugin, monkeypatch, variable):
    install_plugin("good", GOOD)
    monkeypatch.setenv(variable, "goof")

    with pytest.raises(UsageProblem) as caught:
        manager()

    assert render(caught.value) == (
        f"error: {variable}: no plugin is called 'goof'\n  did you mean 'good'?\n  installed: "
        f"builtin, good"
    )
    assert caught.value.exit_code == 2


def test_the_core_cannot_be_disabled(install_plugin, monkeypatch):
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "builtin")

    with pytest.raises(UsageProblem, match="'builtin' is the program itself"):
        manager()


def test_strict_makes_a_failure_an_error_of_the_environment(install_plugin, monkeypatch, capsys):
    install_plugin("broken", BROKEN)
    monkeypatch.setenv("ARB_PLUGINS_STRICT", "1")

    with pytest.raises(EnvironmentProblem) as caught:
        manager()

    assert render(caught.value) == (
        "error: a plugin cannot be loaded, and ARB_PLUGINS_STRICT is set\n"
        "  plugin 'broken' (arb-ternary-broken 1.0) is not loaded: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    )
    assert capsys.readouterr().err == ""


def test_strict_accepts_plugins_that_are_kept_out_on_purpose(install_plugin, monkeypatch):
    install_plugin("broken", BROKEN)
    monkeypatch.setenv("ARB_PLUGINS_STRICT", "1")
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "broken")

    assert record_of("broken").status == "disabled"


def test_the_trace_says_what_was_loaded_from_where(install_plugin, monkeypatch, capsys):
    install_plugin("good", GOOD)
    install_plugin("good", GOOD, version="0.9")
    monkeypatch.setenv("ARB_TRACE_PLUGINS", "1")

    manager()

    trace = capsys.readouterr().err
    assert (
        "plugins: arb-ternary-good 1.0 ignored: arb-ternary-good 0.9 comes first on sys.path\n"
        in trace
    )
    assert (
        "plugins: 'good' (arb-ternary-good 0.9) from fake_good: loaded: masking stripes\n" in trace
    )
    assert "plugins: fake_good imported [" in trace


def test_plugins_are_loaded_in_the_order_of_their_names(install_plugin):
    for name in ("zebra", "ant"):
        install_plugin(name, GOOD.replace("stripes", name))

    assert [record.name for record in manager().records] == ["ant", "builtin", "zebra"]


def test_a_plugin_that_calls_the_manager_while_loading_fails(install_plugin):
    install_plugin("eager", "from arb_ternary.plugins.manager import manager\nmanager()\n")

    assert (
        record_of("eager").reason
        == "RuntimeError: manager() was called by a plugin while plugins are being loaded"
    )


def test_the_manager_is_loaded_once(install_plugin):
    assert manager() is manager()
    before = manager()
    reset_manager()
    assert manager() is not before


def test_warnings_of_deprecated_hooks_reach_the_user(install_plugin, monkeypatch):
    monkeypatch.setitem(
        hookspecs.arb_plugin_info.arb_ternary_spec,
        "warn_on_impl",
        DeprecationWarning("use the metadata"),
    )
    install_plugin("old", GOOD + "@hookimpl\ndef arb_plugin_info():\n    return {}\n")

    with pytest.warns(DeprecationWarning, match="use the metadata"):
        manager()

    assert record_of("old").status == "loaded"


@pytest.mark.parametrize("hook", [hook.__name__ for hook in hookspecs.RUN_HOOKS])
def test_a_plugin_cannot_implement_a_hook_of_a_run(install_plugin, hook):
    def implementation() -> None: ...

    with pytest.raises(EnvironmentProblem) as caught:
        manager().register(SimpleNamespace(**{hook: hookimpl(implementation)}), "watcher")
    assert caught.value.what.endswith(
        f"{hook} is called on the observers of a run only: register a tracker that implements it"
    )


# --- hooks of plugins

#: A plugin that adds a hook.
HOOKS = (
    HEAD
    + """
import types
from arb_ternary.hookspecs import hookspec

def arb_register_orders():
    "Register orders of rows."

hooks = types.ModuleType("fake_hookspecs")
hooks.arb_register_orders = hookspec(arb_register_orders)

@hookimpl
def arb_register_hooks():
    return [hooks]
"""
)
ORDER = (
    HEAD
    + """
from types import SimpleNamespace

@hookimpl
def arb_register_orders():
    return [SimpleNamespace(name="reversed")]
"""
)


def test_a_plugin_adds_a_hook_that_others_implement(install_plugin):
    install_plugin("an_order", ORDER)
    install_plugin("ordering", HOOKS)

    ((record, order),) = manager().registry.results("arb_register_orders")
    assert (record.name, order.name) == ("an_order", "reversed")
    assert manager().registry.by_name("arb_register_orders") == {"reversed": order}
    assert record.components == ()


def test_two_plugins_cannot_register_the_same_name_with_a_hook(install_plugin):
    install_plugin("an_order", ORDER)
    install_plugin("another_order", ORDER)
    install_plugin("ordering", HOOKS)

    with pytest.raises(EnvironmentProblem) as caught:
        manager().registry.by_name("arb_register_orders")
    assert caught.value.what == (
        "arb_register_orders: 'reversed' is provided by more than one plugin: 'an_order' "
        "(arb-ternary-an_order 1.0) and 'another_order' (arb-ternary-another_order 1.0)"
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("[hooks]", "[1]", "arb_register_hooks returned 1; every item must be a module"),
        ("arb_register_orders", "arb_orders", "fake_hookspecs.arb_orders: a hook of a plugin is"),
        ("_orders():", "_orders(rows):", "takes no arguments"),
        ('"Register orders of rows."', "...", "has a docstring"),
        ("arb_register_orders", "arb_register_masking", "there is a hook arb_register_masking"),
    ],
)
def test_a_faulty_hook_of_a_plugin_is_refused(install_plugin, before, after, reason):
    install_plugin("good", GOOD)
    install_plugin("ordering", HOOKS.replace(before, after))

    assert not record_of("ordering").loaded
    assert reason in record_of("ordering").reason
    assert record_of("good").status == "loaded"


def test_hooks_come_from_an_installed_plugin_only(install_plugin, tmp_path):
    file = tmp_path / "ordering_file.py"
    file.write_text(HOOKS)

    with pytest.raises(EnvironmentProblem, match="hooks come from installed plugins only"):
        manager().load_file(file)


# --- by hand


class Stripes:
    @hookimpl
    def arb_register_masking(self):
        return [MaskingSpec(name="stripes", target="nowhere:build")]


def test_an_object_can_be_registered(install_plugin):
    record = manager().register(Stripes())

    assert (record.name, [found.name for found in record.components]) == ("Stripes", ["stripes"])
    assert manager().registry.get("masking", "stripes").plugin.name == "Stripes"


def test_a_name_is_registered_once(install_plugin):
    manager().register(Stripes(), "mine")

    with pytest.raises(UsageProblem) as caught:
        manager().register(Stripes(), "mine")

    assert render(caught.value) == (
        "error: a plugin called 'mine' is loaded already\n  give another name"
    )


def test_registering_a_taken_name_is_refused_as_a_whole(install_plugin):
    class Rival:
        @hookimpl
        def arb_register_masking(self):
            return [
                MaskingSpec(name="fresh", target="m:b"),
                MaskingSpec(name="stripes", target="m:b"),
            ]

    install_plugin("good", GOOD)

    with pytest.raises(
        EnvironmentProblem,
        match=r"masking strategy 'stripes' is also provided by plugin 'good'",
    ):
        manager().register(Rival())

    assert manager().registry.names("masking") == ("stripes",)
    assert manager().implemented_by("Rival") == ()
    assert [record.name for record in manager().records] == ["builtin", "good"]


def test_a_plugin_file_is_loaded_once_and_names_its_targets(install_plugin, tmp_path):
    file = tmp_path / "stripes_plugin.py"
    file.write_text(
        GOOD.replace("fake_good", "stripes_plugin") + "\ndef build(config):\n    return 'built'\n"
    )

    record = manager().load_file(file)

    assert manager().load_file(str(file)) is record
    assert manager().files == (file,)
    assert record.name == "stripes_plugin"
    assert manager().registry.get("masking", "stripes").load()(None) == "built"


def test_a_plugin_file_that_fails_leaves_no_module(install_plugin, tmp_path):
    file = tmp_path / "broken_file.py"
    file.write_text(BROKEN)

    with pytest.raises(EnvironmentProblem) as caught:
        manager().load_file(file)

    assert render(caught.value) == (
        f"error: plugin file {file} failed: ModuleNotFoundError: No module named "
        f"'a_module_that_is_not_there'"
    )
    assert "broken_file" not in sys.modules
    assert manager().files == ()


def test_a_plugin_file_for_another_interface_leaves_no_module(install_plugin, tmp_path):
    file = tmp_path / "future_file.py"
    file.write_text(TOO_NEW)

    with pytest.raises(EnvironmentProblem, match=r"written for plugin interface 2\.0"):
        manager().load_file(file)

    assert "future_file" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py", "there is no such plugin file"),
        ("loop.py", "there is no such plugin file"),
        ("my-plugin.py", "a plugin file is called NAME.py"),
        ("plugin.txt", "a plugin file is called NAME.py"),
        ("json.py", "a module called 'json' exists already"),
    ],
)
def test_a_path_that_cannot_be_a_plugin_file_is_a_usage_error(
    install_plugin, tmp_path: Path, name, message
):
    if name == "loop.py":
        (tmp_path / name).symlink_to(name)
    elif name != "missing.py":
        (tmp_path / name).write_text(GOOD)

    with pytest.raises(UsageProblem, match=message) as caught:
        manager().load_file(tmp_path / name)

    assert str(tmp_path / name) in caught.value.what


def test_facts_about_a_plugin_come_from_its_own_hook(install_plugin):
    install_plugin(
        "good", GOOD + "@hookimpl\ndef arb_plugin_info():\n    return {'summary': 'stripes'}\n"
    )
    install_plugin("other", OPTIMIZER)

    assert manager().plugin_info("good") == {"summary": "stripes"}
    assert manager().plugin_info("other") == {}
    assert manager().implemented_by("good") == ("arb_register_masking", "arb_plugin_info")


def test_specs_refuse_names_and_targets_that_are_none():
    with pytest.raises(ValueError, match="name"):
        OptimizerSpec(name="Swift", target="m:b", accepts={"float"})
    with pytest.raises(ValueError, match="target"):
        OptimizerSpec(name="swift", target="m.b", accepts={"float"})


def test_a_plugin_file_whose_folder_is_on_the_path_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text(GOOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    reset_manager()
    try:
        assert manager().load_file(tmp_path / "beside_the_notebook.py").loaded
    finally:
        reset_manager()
