"""Register the components of the core, through the same hooks as every plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import BackendSpec, CommandSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "the torch backend and the commands that explain an installation"}


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    return (
        BackendSpec(
            name="torch",
            target="arb_ternary.backends.reference:build",
            probe="arb_ternary.backends.reference_probe:probe",
            priority=0,
            devices=("cpu", "cuda", "mps"),
            summary="reference kernels in torch, right everywhere",
            libraries=("torch", "numpy", "safetensors"),
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    commands = {
        "config": ("groups:config", "Write, check and explain config files."),
        "config.new": (
            "config_commands:new",
            "Write a starter config, with every option explained.",
        ),
        "config.schema": ("config_commands:schema", "Print the JSON Schema of config files."),
        "config.show": (
            "config_commands:show",
            "Print a config as it takes effect, and where each value comes from.",
        ),
        "config.validate": (
            "config_commands:validate",
            "Check a config; list everything that is wrong with it.",
        ),
        "plugins": ("groups:plugins", "List, inspect, check and write plugins."),
        "plugins.list": (
            "plugins_commands:list_plugins",
            "Every plugin that was found, and what became of it.",
        ),
        "plugins.show": ("plugins_commands:show", "Everything about a plugin."),
        "plugins.hooks": ("plugins_commands:hooks", "Every hook that a plugin can implement."),
        "backends": ("groups:backends", "List the kernel backends and explain the choice."),
        "backends.list": (
            "backends_commands:list_backends",
            "Every backend, and whether it can be used.",
        ),
        "backends.explain": ("backends_commands:explain", "Which backend is used, and why."),
        "doctor": ("doctor:doctor", "Say what works here and what does not."),
    }
    return tuple(
        CommandSpec(name=name, target=f"arb_ternary.cli.{target}", summary=summary)
        for name, (target, summary) in commands.items()
    )
