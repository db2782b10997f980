"""Test `arb plugins check`: the kit on an installed plugin."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from arb_ternary.cli.main import main
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import reset_manager
from arb_ternary_testing import install_fake_plugin
from arb_ternary_testing.runner import check_plugin

HOOKS = """
from arb_ternary import hookimpl
from arb_ternary.specs import MaskingSpec, OptimizerSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_masking():
    return [MaskingSpec(name="fake", target="arb_ternary_fake.parts:{masking}",
        summary="{summary}")]
"""
PARTS = """
from arb_ternary_text.data.masking import CausalMasking, build_causal


class Tampering(CausalMasking):
    def apply(self, batch, generator, context):
        batch.data[:] = 0
        return super().apply(batch, generator, context)


def build_tampering(config):
    return Tampering()
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(forked: Callable[..., tuple[int, str]]) -> Check:
    """Return a function that runs the command with a folder of installed distributions."""

    def run(site: Path, *options: str) -> tuple[int, str]:
        def command() -> int:
            os.environ["PYTHONPATH"] = str(site)
            sys.path.insert(0, str(site))
            reset_manager()
            return main(["plugins", "check", "fake", *options])

        return forked(command)

    return run


def fake(folder: Path, hooks: str, parts: str = PARTS) -> Path:
    files = {"arb_ternary_fake/plugin.py": hooks, "arb_ternary_fake/parts.py": parts}
    return install_fake_plugin(folder / "site", "arb-ternary-fake", files)


def test_fake_plugin_is_an_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install_fake_plugin(
        tmp_path, "arb-ternary-x", {"arb_ternary_x/deep/plugin.py": ""}, requires=("attrs>=1",)
    )
    monkeypatch.syspath_prepend(site)
    (found,) = distributions(name="arb-ternary-x")
    assert (found.version, found.requires) == ("1.0", ["attrs>=1"])
    (entry,) = found.entry_points
    assert (entry.group, entry.name) == ("arb_ternary.plugins", "x")
    assert entry.value == "arb_ternary_x.deep.plugin"
    assert entry.load().__name__ == "arb_ternary_x.deep.plugin"


def test_conforming_plugin_passes(tmp_path: Path, check: Check) -> None:
    code, output = check(fake(tmp_path, HOOKS.format(masking="build_causal", summary="a copy")))
    assert code == 0, output
    assert re.search(r"^masking fake +MaskingSuite +\d+ +0 +0$", output, re.MULTILINE)
    assert output.splitlines()[0] == "plugin 'fake' (arb-ternary-fake 1.0)"
    assert output.rstrip().endswith("all passed")


def test_plugin_file_is_checked(tmp_path: Path, forked: Callable[..., tuple[int, str]]) -> None:
    file = tmp_path / "striped.py"
    hooks = HOOKS.replace("arb_ternary_fake.parts", "striped")
    file.write_text(PARTS + hooks.format(masking="build_causal", summary="a copy"))
    for arguments, wanted in (([], 0), (["--kind", "phase"], 2)):
        code, output = forked(lambda more=arguments: main(["plugins", "check", str(file), *more]))
        assert code == wanted, output
        if not arguments:
            assert re.search(r"^masking fake +MaskingSuite +\d+ +0 +0$", output, re.MULTILINE)
            assert output.rstrip().endswith("all passed")

    with pytest.raises(UsageProblem, match="there is no such plugin file"):
        check_plugin(str(tmp_path / "absent.py"))


def test_fault_is_printed_with_its_test(tmp_path: Path, check: Check) -> None:
    code, output = check(fake(tmp_path, HOOKS.format(masking="build_tampering", summary="a fault")))
    assert code == 1
    assert "--- masking fake: test_batch_is_left_unchanged" in output
    assert "assert torch.equal(batch.data, tokens)" in output
    assert output.rstrip().endswith(" failed")


def test_missing_target_and_summary_are_failures(tmp_path: Path, check: Check) -> None:
    code, output = check(fake(tmp_path, HOOKS.format(masking="build_nothing", summary="")))
    assert code == 1
    assert (
        "--- masking fake: target\narb_ternary_fake.parts:build_nothing: AttributeError" in output
    )
    assert "--- masking fake: summary" in output


def test_hook_module_that_imports_torch_fails(tmp_path: Path, check: Check) -> None:
    hooks = "import torch\n" + HOOKS.format(masking="build_causal", summary="heavy")
    code, output = check(fake(tmp_path, hooks))
    assert code == 1
    assert "arb_ternary_fake.plugin imports torch" in output


def test_plugin_that_cannot_be_loaded_has_exit_code_3(tmp_path: Path, check: Check) -> None:
    code, output = check(fake(tmp_path, "raise RuntimeError('broken on purpose')"))
    assert code == 3
    assert "broken on purpose" in output


def test_component_with_a_required_option_is_left_out(tmp_path: Path, check: Check) -> None:
    hooks = HOOKS.format(masking="build_causal", summary="picky").replace(
        'summary="picky"', 'summary="picky", config="arb_ternary_fake.parts:Config"'
    )
    parts = PARTS + (
        "\n\nfrom attrs import frozen\nfrom arb_ternary.config.options import option\n\n\n"
        "@frozen\nclass Config:\n    depth: int = option(help='how deep')\n"
    )
    code, output = check(fake(tmp_path, hooks, parts))
    assert code == 0, output
    assert "MaskingSuite: left to the plugin's tests, needs depth" in output


def test_one_kind_can_be_checked_alone(tmp_path: Path, check: Check) -> None:
    site = fake(tmp_path, HOOKS.format(masking="build_causal", summary="a copy"))
    code, output = check(site, "--kind", "phase")
    assert code == 2
    assert "plugin 'fake' provides no phase" in output
    assert "it provides: masking" in output


def test_unknown_plugin_gets_the_nearest_name() -> None:
    with pytest.raises(UsageProblem, match="no plugin is called 'bultin'") as caught:
        check_plugin("bultin")
    assert caught.value.hint.startswith("did you mean 'builtin'?")
