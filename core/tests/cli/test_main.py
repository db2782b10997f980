"""The ``arb`` command itself: help, plugin commands, exit codes, cost."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from importlib.metadata import version

import pytest

from arb_ternary import __version__
from arb_ternary.backends.select import current_backend
from arb_ternary.cli.main import arb, main
from arb_ternary.plugins.manager import manager

HEAD = """
from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec
ARB_API_VERSION = (1, 0)
"""
COMMAND = (
    HEAD
    + """
@hookimpl
def arb_register_commands():
    return [CommandSpec(name="dance", target="fake_dance_command:dance",
        summary="Dance to the music.")]
"""
)
DANCE = """
import click
from arb_ternary import errors

@click.command()
@click.argument("how")
def dance(how):
    match how:
        case "well":
            click.echo("danced")
        case "badly":
            return 1
        case "true":
            return True
        case "ours":
            raise errors.EnvironmentProblem("music: there is none", "turn it on\\n\\nor sing")
        case "saved":
            raise errors.Interrupted("saved step 3", "arb train --resume auto")
        case "stop":
            raise KeyboardInterrupt
        case "ask":
            click.prompt("how")
        case "confirm":
            click.confirm("sure", abort=True)
        case "exit":
            click.get_current_context().exit(7)
        case "large":
            raise MemoryError("Unable to allocate 2.0 TiB")
        case "huge":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\\nBacktrace")
        case "wide":
            torch = type("OutOfMemoryError", (RuntimeError,), {})
            raise torch("CUDA out of memory. Tried to allocate 2 TiB.")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "runtime":
            raise RuntimeError("a bug")

@click.command()
@click.option("--heat", type=float, callback=lambda ctx, parameter, value: -value)
@click.option("--count", type=click.IntRange(min=1), default=1)
@click.option("--seed", type=int, default=0)
def melt(heat, count, seed):
    click.echo(f"{heat} {count} {seed}")
"""
HEAVY = ("torch", "triton", "tilelang", "numpy", "yaml", "cattrs", "rich", "matplotlib")


@pytest.fixture
def dance(install_plugin):
    install_plugin("dance", COMMAND).joinpath("fake_dance_command.py").write_text(DANCE)


@pytest.fixture
def melt(install_plugin):
    source = COMMAND.replace('name="dance"', 'name="melt"').replace(":dance", ":melt")
    install_plugin("dance", source).joinpath("fake_dance_command.py").write_text(DANCE)


# --- help


def test_help_lists_commands_and_imports_no_target(dance, capsys):
    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    shown = [command for command in manager().registry.all("command") if "." not in command.name]
    assert len(shown) > 4
    for command in shown:
        assert command.spec.summary
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [command.name]]
        assert line.split(maxsplit=1)[1] == command.spec.summary
    assert "dance     Dance to the music." in text
    assert "fake_dance_command" not in sys.modules


def test_help_of_the_core_alone_is_this(install_plugin, capsys):
    main(["-h"])

    assert capsys.readouterr().out == (
        "Usage: arb [OPTIONS] COMMAND [ARGS]...\n"
        "\n"
        "  Train, convert and ship pure-ternary neural networks.\n"
        "\n"
        "Options:\n"
        "  --plugin FILE  Load a plugin from a Python file. Can be repeated.\n"
        "  --version      Show the version and exit.\n"
        "  -h, --help     Show this message and exit.\n"
        "\n"
        "Commands:\n"
        "  backends  List the kernel backends and explain the choice.\n"
        "  config    Write, check and explain config files.\n"
        "  doctor    Say what works here and what does not.\n"
        "  plugins   List, inspect, check and write plugins.\n"
    )


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"arb {__version__} (plugins 1.0)\n"
    assert version("arb-ternary-core") == __version__


@pytest.mark.parametrize(
    "source",
    [
        "import a_module_that_is_not_there",
        COMMAND.replace("(1, 0)", "(9, 0)"),
        COMMAND.replace('"dance"', '"plugins"'),
        COMMAND.replace("arb_register_commands", "arb_register_command"),
    ],
    ids=["broken", "too new", "conflicting", "unknown hook"],
)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["plugins", "list"], ["plugins", "show", "bad"], ["doctor"]]
)
def test_a_plugin_that_cannot_be_used_leaves_the_program_working(
    install_plugin, capsys, source, arguments
):
    install_plugin("bad", source)

    assert main(arguments) == 0

    printed = capsys.readouterr()
    assert printed.err.count("warning: plugin 'bad' (arb-ternary-bad 1.0)") == 1
    assert "plugins" in printed.out or "bad" in printed.out


# --- running commands


@pytest.mark.parametrize(
    ("how", "code", "out", "err"),
    [
        ("well", 0, "danced\n", ""),
        ("badly", 1, "", ""),
        ("true", 0, "", ""),
        ("exit", 7, "", ""),
        ("ours", 3, "", "error: music: there is none\n  turn it on\n\n  or sing\n"),
        ("saved", 130, "", "error: saved step 3\n  arb train --resume auto\n"),
    ],
)
def test_the_exit_code_is_what_the_command_means(dance, capsys, how, code, out, err):
    assert main(["dance", how]) == code
    assert capsys.readouterr() == (out, err)


def test_an_interrupt_exits_with_130(dance, capsys):
    assert main(["dance", "stop"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize(
    ("error", "code", "said"), [(EOFError, 1, "aborted"), (KeyboardInterrupt, 130, "interrupted")]
)
def test_end_of_input_and_interrupt_are_failures(dance, monkeypatch, capsys, error, code, said):
    def fail(_prompt=None):
        raise error

    monkeypatch.setattr("click.termui.visible_prompt_func", fail)

    assert main(["dance", "ask"]) == code
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_a_no_to_a_question_is_a_failure_and_not_an_interrupt(dance, monkeypatch):
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _prompt=None: "n")

    assert main(["dance", "confirm"]) == 1


def test_an_interrupt_while_plugins_are_loaded_exits_with_130(install_plugin):
    install_plugin("slow", "raise KeyboardInterrupt")

    assert main(["--help"]) == 130


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("large", "Unable to allocate 2.0 TiB"),
        ("huge", "DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        ("wide", "CUDA out of memory. Tried to allocate 2 TiB."),
    ],
)
def test_memory_that_there_is_not_is_an_error_in_words(dance, capsys, how, said):
    assert main(["dance", how]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: out of memory: {said}"
    assert "batch_size" in lines[1]


def test_another_runtime_error_is_a_bug(dance):
    with pytest.raises(RuntimeError, match="a bug"):
        main(["dance", "runtime"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heat", "inf"], "'--heat': must be 0, or of a size from 1.2e-38 to 3.4e+38"),
        (["--heat", "nan"], "'--heat': must be 0"),
        (["--heat", "1e39"], "'--heat': must be 0"),
        (["--heat", "1", "--count", str(2**31)], "'--count': must be at most 2147483647"),
        (["--heat", "1", "--seed", str(2**63)], "'--seed': must be at most 9223372036854775807"),
    ],
)
def test_a_number_that_no_config_may_have_is_a_wrong_use(melt, capsys, arguments, said):
    assert main(["melt", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_another_number_reaches_the_command(melt, capsys):
    for _ in range(2):
        assert main(["melt", "--heat", "2.5", "--count", "2147483647", "--seed", "2147483648"]) == 0
        assert capsys.readouterr().out == "-2.5 2147483647 2147483648\n"


def test_a_bug_is_not_dressed_up_as_a_user_error(dance):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["dance", "bug"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "Missing argument 'HOW'"),
        (["dance", "well", "--loud"], "No such option"),
        (["--loud"], "No such option"),
        (
            ["plugins", "lst"],
            "error: no command is called 'plugins lst'\n  did you mean 'plugins list'?",
        ),
    ],
)
def test_a_wrong_use_exits_with_2(dance, capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_command_gets_the_nearest_name(dance, capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "error: no command is called 'trian'\n"
        "  did you mean 'train'?\n"
        "  available: backends, backends explain, backends list, config, config new, "
        "config schema, config show, config validate, dance, doctor, plugins, plugins hooks, "
        "plugins list, plugins show\n"
        "  not installed: plugins check (pip install arb-ternary-testing)\n"
        "  not installed: train (pip install arb-ternary-train)\n"
        "  not installed: upcycle (pip install arb-ternary-upcycle)\n"
    )


def test_a_missing_command_names_the_install_command(install_plugin, capsys):
    assert main(["upcycle", "manifest.yaml"]) == 3
    assert (
        capsys.readouterr().err
        == "error: command 'upcycle' is not installed\n  pip install arb-ternary-upcycle\n"
    )


def test_a_missing_command_of_a_group_names_the_install_command(install_plugin, capsys):
    assert main(["plugins", "check", "mine"]) == 3
    assert (
        capsys.readouterr().err
        == "error: command 'plugins check' is not installed\n  pip install arb-ternary-testing\n"
    )


def test_a_plugin_adds_a_command_to_a_group_of_the_core(install_plugin, capsys):
    source = COMMAND.replace('name="dance"', 'name="backends.dance"')
    install_plugin("dance", source).joinpath("fake_dance_command.py").write_text(DANCE)

    assert main(["backends", "--help"]) == 0
    assert "  dance    Dance to the music.\n  explain  " in capsys.readouterr().out
    assert "fake_dance_command" not in sys.modules
    assert main(["backends", "dance", "well"]) == 0
    assert capsys.readouterr().out == "danced\n"
    assert main(["dance", "well"]) == 2


def test_a_command_of_a_group_of_the_core_stays_the_core_s(install_plugin, capsys):
    source = COMMAND.replace('name="dance"', 'name="plugins.list"')
    install_plugin("dance", source).joinpath("fake_dance_command.py").write_text(DANCE)

    assert main(["plugins", "list"]) == 0
    assert "command 'plugins list' is also provided by plugin 'builtin'" in capsys.readouterr().out


def test_a_command_whose_module_is_broken_names_its_plugin(install_plugin, capsys):
    install_plugin("dance", COMMAND)

    assert main(["dance", "well"]) == 3
    assert capsys.readouterr().err == (
        "error: command 'dance' of plugin 'dance' (arb-ternary-dance 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'fake_dance_command'\n"
    )


def test_a_target_that_is_no_click_command_is_an_error(install_plugin, capsys):
    install_plugin("dance", COMMAND).joinpath("fake_dance_command.py").write_text("dance = 3\n")

    assert main(["dance", "well"]) == 1
    assert capsys.readouterr().err == (
        "error: command 'dance' of plugin 'dance' (arb-ternary-dance 1.0): "
        "fake_dance_command:dance is 3, which is not a click command\n"
    )


def test_a_wrong_name_in_a_variable_is_a_usage_error(install_plugin, monkeypatch, capsys):
    monkeypatch.setenv("ARB_PLUGINS", "nonesuch")

    assert main(["--help"]) == 2
    assert (
        capsys.readouterr().err
        == "error: ARB_PLUGINS: no plugin is called 'nonesuch'\n  installed: builtin\n"
    )


def test_a_plugin_file_adds_its_commands(install_plugin, tmp_path, capsys):
    file = tmp_path / "file_plugin.py"
    file.write_text(
        COMMAND.replace("fake_dance_command", "file_plugin")
        + "import click\n@click.command()\ndef dance():\n    click.echo('from a file')\n"
    )

    assert main(["--plugin", str(file), "dance"]) == 0
    assert capsys.readouterr().out == "from a file\n"
    assert main(["--plugin", str(file), "--help"]) == 0
    assert "dance     Dance to the music." in capsys.readouterr().out


def test_a_plugin_file_that_does_not_exist_is_a_usage_error(install_plugin, tmp_path, capsys):
    assert main(["--plugin", str(tmp_path / "none.py"), "plugins", "list"]) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path / 'none.py'}: there is no such plugin file\n"
    )


def test_the_choice_of_a_backend_is_shown_on_standard_error(install_plugin, capsys):
    main(["plugins", "list"])
    capsys.readouterr()

    current_backend()

    assert capsys.readouterr().err == "backend torch on cpu, auto; why: arb backends explain\n"
    assert logging.getLogger("arb_ternary").level == logging.INFO


def test_completion_of_an_unknown_command_does_not_fail(install_plugin):
    with arb.make_context("arb", ["trian"], resilient_parsing=True) as context:
        assert arb.resolve_command(context, ["trian"])[1] is None


# --- cost


def arb_help(*prefix: str) -> list[str]:
    return [sys.executable, *prefix, "-m", "arb_ternary.cli.main", "--help"]


def test_help_imports_nothing_heavy(tmp_path):
    record = (
        "import atexit, json, sys\n"
        f"atexit.register(lambda: json.dump(sorted(sys.modules), "
        f"open({str(tmp_path / 'modules.json')!r}, 'w')))\n"
        "from arb_ternary.cli.main import main\n"
        "sys.exit(main(['--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", record], capture_output=True, text=True, check=True
    )

    modules = json.loads((tmp_path / "modules.json").read_text())
    loaded = {module.partition(".")[0] for module in modules}
    assert "Commands:" in done.stdout
    assert loaded & set(HEAVY) == set()
    assert {"importlib.metadata", "logging", "pathlib"} & set(modules) == set()
    assert "click" in loaded, "the list of modules is a real one"


def test_help_costs_little_more_than_its_libraries(tmp_path):
    # 150 ms of CPU time at most, on a slow machine that is idle; as a ratio, because other work on
    # the same cores makes both slower. Byte code is written, as it is for an installed program.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def cpu_seconds(arguments: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(arguments, stdout=subprocess.DEVNULL, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    libraries = [sys.executable, "-c", "import attrs, click, pluggy"]
    cpu_seconds(arb_help())  # writes the byte code
    costs = [(cpu_seconds(arb_help()), cpu_seconds(libraries)) for _ in range(7)]
    ours, theirs = (min(column) for column in zip(*costs, strict=True))
    assert ours < 2.5 * theirs
