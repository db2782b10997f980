"""A generated plugin builds, installs, and passes its own tests and the conformance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from arb_ternary.errors import UsageProblem
from arb_ternary_testing.scaffold.generate import KINDS, new_plugin


def run(*command: str | Path, folder: Path, site: Path | None = None) -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ARB_", "PYTEST_"))
    }
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", params=KINDS)
def generated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """Return kind and folder of the new distribution, and a folder with its installed wheel."""
    folder = tmp_path_factory.mktemp(request.param)
    made = new_plugin(f"trial-{request.param}", request.param, folder)
    run("build", "--wheel", "--no-isolation", "--outdir", folder / "dist", made, folder=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    site = folder / "site"
    run(
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
        folder=folder,
    )
    return request.param, made, site


def own_tests_pass(folder: Path, site: Path, python: Callable[..., str], *tests: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    output = python(folder, "-m", "pytest", *options, *tests, place=site)
    assert " passed" in output
    assert " failed" not in output


def test_its_own_tests_pass_against_the_installed_wheel(
    generated: tuple[str, Path, Path], python: Callable[..., str]
) -> None:
    kind, folder, site = generated
    # The suite of a phase takes long, and the tests of the page on phases run it.
    tests = ["tests/test_phase.py"] if kind == "phase" else []
    own_tests_pass(folder, site, python, *tests)


@pytest.mark.slow
def test_all_of_its_own_tests_pass_against_the_installed_wheel(
    generated: tuple[str, Path, Path], python: Callable[..., str]
) -> None:
    _, folder, site = generated
    own_tests_pass(folder, site, python)


# Its own tests run the same suite, and the kit tests the command on smaller plugins.
@pytest.mark.slow
def test_the_conformance_kit_passes_from_the_command_line(
    generated: tuple[str, Path, Path],
) -> None:
    kind, folder, site = generated
    output = run(
        "arb_ternary.cli.main", "plugins", "check", f"trial-{kind}", folder=folder, site=site
    )
    component = f"trial_{kind.replace('-', '_')}"
    assert f"{kind.replace('vote-rule', 'optimizer')} {component}" in output
    assert output.rstrip().endswith("all passed")


#: A run of a few steps, whose sections the config in a plugin's README replaces.
TINY: Mapping[str, Any] = {
    "name": "tiny",
    "data": {"name": "text", "path": "texts.csv"},
    "model": {"name": "decoder"},
    "optimizer": "sign_votes",
    "phases": [{"name": "standard"}],
}
TINY_MODEL = {"width": 32, "layers": 1, "heads": 2, "max_length": 16}
TINY_PHASE = {"steps": 3, "batch_size": 2, "block_size": 8, "warmup_steps": 0, "eval_batches": 1}


def test_a_run_trains_with_the_config_of_its_readme(
    generated: tuple[str, Path, Path], python: Callable[..., str]
) -> None:
    kind, folder, site = generated
    readme = (folder / "README.md").read_text(encoding="utf-8")
    config = dict(TINY)
    if kind == "backend":
        config["backend"] = "trial_backend"
    else:
        block = readme.partition("```yaml\n")[2].partition("```")[0]
        config |= yaml.safe_load(block)
    if config["model"]["name"] == "decoder":
        config["model"] = {**config["model"], **TINY_MODEL}
    config["phases"] = [{**phase, **TINY_PHASE} for phase in config["phases"]]
    rows = "".join(f'{number},"line {number} of a text"\n' for number in range(200))
    (folder / "texts.csv").write_text(f"number,text\n{rows}", encoding="utf-8")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    command = ("-m", "arb_ternary.cli.main", "train", "tiny.yaml", "--run-dir", "tiny")
    python(folder, *command, place=site)
    result = json.loads((folder / "tiny" / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 3
    if kind == "tracker":
        assert json.loads((folder / "tiny" / "best.json").read_text())["step"] == 3


# Reading the types of torch takes most of a minute.
@pytest.mark.slow
def test_its_code_has_the_types_that_it_says(
    generated: tuple[str, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, folder, site = generated
    pytest.importorskip("mypy")
    # One cache for all kinds: most of the time goes into the types of torch.
    run("mypy", "--cache-dir", tmp_path_factory.getbasetemp() / "mypy", folder=folder, site=site)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["q", "a-name-of-many-words"])
def test_generated_code_is_clean_whatever_its_name(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    folder = new_plugin(name, kind, tmp_path)
    run("ruff", "check", "--no-cache", ".", folder=folder)
    run("ruff", "format", "--no-cache", "--check", ".", folder=folder)


def test_the_templates_travel_in_the_wheel_of_the_kit(
    wheels: Callable[[Any], Path], projects: Mapping[str, Any], tmp_path: Path
) -> None:
    wheel = wheels(projects["arb-ternary-testing"])
    site = tmp_path / "site"
    run(
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
        folder=tmp_path,
    )
    code = (
        "import sys; from pathlib import Path; from arb_ternary_testing.scaffold.generate "
        "import *\n"
    )
    code += "assert str(Path(new_plugin.__code__.co_filename)).startswith(sys.argv[1])\n"
    code += "for kind in KINDS: print(new_plugin('x-' + kind, kind, Path(sys.argv[2])))\n"
    script = tmp_path / "generate.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run(
        [sys.executable, script, site, tmp_path / "out"],
        env=environment,
        check=True,
        capture_output=True,
    )
    source = {path.relative_to(tmp_path / "here") for path in _generate_all(tmp_path / "here")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} == source


def _generate_all(folder: Path) -> list[Path]:
    for kind in KINDS:
        new_plugin(f"x-{kind}", kind, folder)
    return list(folder.rglob("*"))


def test_generated_files_have_no_placeholder_left(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = new_plugin("arb-ternary-word-drop", kind, tmp_path / kind)
        assert folder == tmp_path / kind / "arb-ternary-word-drop"
        assert (folder / "src" / "arb_ternary_word_drop" / "plugin.py").exists()
        assert (folder / ".gitignore").exists()
        for path in folder.rglob("*"):
            assert not {"PACKAGE", "template"} & set(path.name.replace(".", "/").split("/"))
            if path.is_file():
                assert "$" not in path.read_text(), path
        assert (
            'word-drop = "arb_ternary_word_drop.plugin"' in (folder / "pyproject.toml").read_text()
        )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Word Drop", "use 'word-drop'"),
        ("word_drop", "use 'word-drop'"),
        ("2fast", "use 'fast'"),
        ("-x", "use 'x'"),
        ("a--b", "use 'a-b'"),
        ("../escape", "use 'escape'"),
        ("", "for example 'my-optimizer'"),
        ("arb-ternary-", "for example 'my-optimizer'"),
        ("é", "for example 'my-optimizer'"),
    ],
)
def test_impossible_name_is_an_error_that_suggests_another(
    name: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageProblem, match="cannot be the name of a plugin") as caught:
        new_plugin(name, "optimizer", tmp_path)
    assert caught.value.hint == hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["core", "triton", "arb-ternary-signgsd"])
def test_the_name_of_a_distribution_that_exists_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="is the name of an existing distribution"):
        new_plugin(name, "optimizer", tmp_path)


def test_a_kind_without_a_template_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        new_plugin("x", "optimiser", tmp_path)
    assert caught.value.hint == (
        "did you mean 'optimizer'?\n"
        "templates: backend, data, masking, model, optimizer, phase, tracker, vote-rule"
    )


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "arb-ternary-x"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UsageProblem, match="already exists and is not an empty folder"):
        new_plugin("x", "optimizer", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["arb-ternary-x", "mine.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "arb-ternary-x").mkdir()
    assert (new_plugin("x", "phase", tmp_path) / "pyproject.toml").exists()


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def fail_at_the_fifth(self: Path, *arguments: object, **options: object) -> int:
        written.append(self)
        if len(written) == 5:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(Path, "write_text", fail_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        new_plugin("x", "optimizer", tmp_path)
    assert list(tmp_path.iterdir()) == []
