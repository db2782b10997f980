"""Make the reference pages of the site from the code.

They are made when the site is built and are not committed: ``docs/scripts/site_pages.py`` runs this
script, which prints the pages as JSON, Markdown by path below ``reference/``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import click

from formats import formats_page
from render import (
    attribute_list,
    docstring,
    prose,
    public_names,
    rules,
    signature,
    table,
    type_text,
)

ROOT = Path(__file__).parents[2]
#: Kinds of component that have no section in a config file.
NOT_IN_CONFIGS = ("backend", "command", "generator", "starter")
#: The keys that a first config needs, with the class and the field that document each.
MOST_USED = (
    ("name", "arb_ternary_train.config:RunConfig", "name"),
    ("data", "arb_ternary_train.config:RunConfig", "data"),
    ("model.width", "arb_ternary_text.models.config:DecoderConfig", "width"),
    ("model.layers", "arb_ternary_text.models.config:DecoderConfig", "layers"),
    ("optimizer", "arb_ternary_train.config:RunConfig", "optimizer"),
    ("phases.0.steps", "arb_ternary_train.options:StandardConfig", "steps"),
    ("phases.0.batch_size", "arb_ternary_train.options:StandardConfig", "batch_size"),
    ("phases.0.block_size", "arb_ternary_train.options:StandardConfig", "block_size"),
    ("phases.0.eval_every", "arb_ternary_train.options:StandardConfig", "eval_every"),
    ("checkpoint.every", "arb_ternary_train.config:CheckpointConfig", "every"),
)


#: What plugins derive from, call or are given, beyond the protocols: title, module, names.
BUILDING_BLOCKS = (
    (
        "Optimizers of ternary modules",
        "arb_ternary.optim.ternary",
        ("TernaryOptimizer", "VoteUpdate"),
    ),
    (
        "Ternary modules",
        "arb_ternary.ternary.module",
        ("TernaryModule", "VoteOptions"),
    ),
    ("Votes of a module", "arb_ternary.ternary.vote_memory", ("VoteMemory",)),
    (
        "Modules of a model",
        "arb_ternary.ternary.models",
        ("ternary_modules", "seed_votes"),
    ),
    ("Random numbers", "arb_ternary.counters.hashing", ("counter_hash", "uniform", "hash_words")),
    ("Phases", "arb_ternary_train.standard", ("StandardPhase", "log_and_evaluate")),
    ("Options of phases", "arb_ternary_train.options", ("LoopOptions", "StandardConfig")),
    ("A run in progress", "arb_ternary_train.context", ("TrainingContext",)),
    ("The training loop", "arb_ternary_train.loop", ("TrainingLoop",)),
    ("Results of a step", "arb_ternary_train.step", ("StepReport", "Skip", "StepResult")),
    ("A state to return to", "arb_ternary_train.loop_state", ("Snapshot",)),
    ("Texts", "arb_ternary_text.data.files", ("Text", "read_utf8", "text_source", "split_source")),
    ("Batches", "arb_ternary_text.data.loader", ("SampledBatches",)),
    ("Loading plugins", "arb_ternary.plugins.manager", ("manager", "reset_manager", "Plugins")),
    ("The torch backend", "arb_ternary.backends.reference", ("pack", "unpack")),
)


def workspace() -> frozenset[str]:
    """Return the distributions of this repository.

    Components of others that are installed here are left out.
    """
    files = [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    files += ROOT.glob("backends/*/pyproject.toml")
    return frozenset(
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files
    )


def components(kind: str) -> list[Any]:
    """Return the registered components of a kind that belong to this repository, core's first."""
    from arb_ternary.plugins.manager import manager

    mine = workspace()
    found = [each for each in manager().registry.all(kind) if each.distribution in mine]
    return sorted(
        found,
        key=lambda each: (each.distribution != "arb-ternary-core", each.distribution, each.name),
    )


def kinds() -> Mapping[str, Any]:
    """Return the kinds of component of this repository."""
    from arb_ternary.plugins.manager import manager

    return manager().registry.kinds


# --- pages


def hooks_page() -> str:
    """Return the page of every hook with its signature."""
    from arb_ternary import API_VERSION, hookspecs
    from arb_ternary.plugins.hooks import group_of
    from arb_ternary.plugins.manager import manager

    titles = {
        "registration": ("Registration", "Called once, when the plugins are loaded."),
        "information": ("Information", "Called when somebody asks."),
        "selection": ("Selection", "The first result that is not None decides."),
        "observer": (
            "Observers",
            "Called on the trackers that a config names, in the order of the config.",
        ),
    }
    parts = [
        "# Hooks",
        prose(inspect.getdoc(hookspecs) or ""),
        f"A hook module declares `ARB_API_VERSION = {API_VERSION}` and marks its implementations "
        "with `arb_ternary.hookimpl`. An implementation takes any subset of the arguments, by "
        "name. `arb plugins hooks` prints this list. The types are in `arb_ternary.specs`, "
        "`arb_ternary.protocols.runs`, `arb_ternary.backends.select`, `collections.abc`, `types` "
        "and `typing`.",
    ]
    for group, (title, text) in titles.items():
        parts.append(f"## {title}\n\n{text}")
        for hook in manager().hooks:
            if group_of(hook) == group:
                name = hook.__name__
                shown = signature(name, hook)
                parts.append(f"### `{name}`\n\n```python\n{shown}\n```\n\n{docstring(hook)}")
    return "\n\n".join(parts)


def specs_page() -> str:
    """Return the page of specs: the results of registration hooks."""
    from arb_ternary import specs

    parts = ["# Specs", prose(inspect.getdoc(specs) or "")]
    for found in (specs.Spec, *kinds().values()):
        where = (
            f"Kind `{found.kind}`, from `{found.__module__}`. " if found is not specs.Spec else ""
        )
        parts.append(
            f"## `{found.__name__}`\n\n{where}{docstring(found)}\n\n{attribute_list(found)}"
        )
    function = specs.resolve
    parts.append(
        f"## `resolve`\n\n```python\n{signature('resolve', function)}\n```\n\n{docstring(function)}"
    )
    return "\n\n".join(parts)


def config_pages() -> dict[str, str]:
    """Return the pages of config keys: the top level, then one page per kind of component."""
    from arb_ternary.config.structure import options_class
    from arb_ternary_train.config import RunConfig

    listed = {kind: spec for kind, spec in kinds().items() if kind not in NOT_IN_CONFIGS}
    links = [(f"[`{kind}`]({kind}.md)", spec.noun) for kind, spec in listed.items()]
    pages = {
        "config/index.md": "\n\n".join(
            [
                "# Config keys",
                "Configs are YAML. A component is its name (`masking: causal`) or a mapping with "
                "its name and options (`optimizer: {name: adamw, lr: 0.002}`). An unknown key is "
                "an error. `arb config new` writes a commented file, `arb config show --origin` "
                "prints what takes effect, `arb config schema` prints the JSON Schema.",
                "## The most used keys",
                most_used(),
                "## Top level",
                option_table(RunConfig),
                "## Components",
                table(("kind", "what it is"), links),
            ]
        )
    }
    for kind, spec in listed.items():
        parts = [f"# {spec.noun[0].upper()}{spec.noun[1:]}"]
        for found in components(kind):
            summary = prose(found.spec.summary)
            parts.append(f"## `{found.name}`\n\n{summary}. From `{found.distribution}`.")
            cls = options_class(found.spec)
            parts.append("It has no options." if cls is None else option_table(cls))
        pages[f"config/{kind}.md"] = "\n\n".join(parts)
    return pages


def most_used() -> str:
    """Return the table of the keys that a first config needs."""
    from arb_ternary.config.fields import config_fields
    from arb_ternary.specs import resolve

    rows = []
    for path, target, name in MOST_USED:
        field = next(each for each in config_fields(resolve(target)) if each.name == name)
        rows.append((f"`{path}`", type_text(field.type), default_text(field), help_text(field)))
    return table(("key", "value", "default", "meaning"), rows)


def option_table(cls: type[Any]) -> str:
    """Return the table of the options of a config class."""
    rows = [
        (f"`{path}`", type_text(field.type), default_text(field), help_text(field))
        for path, field in options(cls)
    ]
    return table(("key", "value", "default", "meaning"), rows)


def options(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return key and field of every option; nested mappings have dotted keys."""
    from arb_ternary.config.fields import config_fields, shape_of

    for field in config_fields(cls):
        path = f"{prefix}{field.alias}"
        yield path, field
        if shape_of(field.type) == "class":
            yield from options(field.type, f"{path}.")


def default_text(field: Any) -> str:
    """Return the default as a file would spell it."""
    from arb_ternary.config.fields import default_of, is_required
    from arb_ternary.config.yaml_document import dump_inline

    if is_required(field):
        return "required"
    if attrs.has(field.type) and isinstance(default_of(field), dict):
        return "as below"
    return f"`{dump_inline(default_of(field))}`"


def help_text(field: Any) -> str:
    """Return the help text, and the rules of the validators."""
    from arb_ternary.config.options import HELP

    text = field.metadata[HELP]
    demands = [demand for demand in rules(field.validator) if demand not in text]
    return prose(text).replace("|", "\\|") + (f" ({'; '.join(demands)})" if demands else "")


def command_pages() -> dict[str, str]:
    """Return the pages of commands: one per group, and one that lists them."""
    from arb_ternary.cli.main import arb

    groups: dict[str, list[str]] = {}
    rows = []
    for found in sorted(components("command"), key=lambda each: each.name):
        group = found.name.partition(".")[0]
        path = f"arb {found.name.replace('.', ' ')}"
        rows.append((f"[`{path}`]({group}.md)", prose(found.spec.summary)))
        parts = groups.setdefault(group, [f"# arb {group}"])
        parts += command_texts(found.load(), path)
        if found.name == "generate":
            for generator in components("generator"):
                parts += command_texts(generator.load(), f"arb generate --with {generator.name}")
    pages = {f"commands/{group}.md": "\n\n".join(parts) for group, parts in groups.items()}
    pages["commands/index.md"] = "\n\n".join(
        [
            "# Commands",
            "Exit codes are on the page [Errors](../errors.md). Everything that lists takes "
            "`--json`.",
            table(("command", "what it does"), rows),
            command_text(arb, "arb"),
        ]
    )
    return pages


def command_texts(command: click.Command, path: str) -> Iterator[str]:
    """Return the text of a command, then of its sub-commands."""
    yield command_text(command, path)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from command_texts(command.commands[name], f"{path} {name}")


def command_text(command: click.Command, path: str) -> str:
    """Return usage, help and options of one command, independent of click's version."""
    arguments = [argument_text(each) for each in command.params if isinstance(each, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND ...")
    rows = [
        option_texts(each)
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden
    ]
    usage = " ".join([path, *(["[OPTIONS]"] if rows else []), *arguments])
    text = f"## `{path}`\n\n```\n{usage}\n```\n\n{prose(inspect.cleandoc(command.help or ''))}"
    return f"{text}\n\n{table(('option', 'meaning'), rows)}" if rows else text


def argument_text(argument: click.Argument) -> str:
    """Return an argument as a usage line shows it."""
    name = argument.metavar or (argument.name or "").upper()
    many = "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def option_texts(option: click.Option) -> tuple[str, str]:
    """Return spelling and meaning of an option."""
    value = ""
    if not option.is_flag:
        choices = getattr(option.type, "choices", None)
        value = option.metavar or (
            "|".join(map(str, choices)) if choices else option.type.name.upper().split()[0]
        )
    names = "/".join([*option.opts, *option.secondary_opts])
    facts = [prose(option.help or "")]
    facts += ["Required."] if option.required else []
    facts += [f"Default: `{option.default}`."] if option.show_default else []
    return f"`{names} {value}`".replace(" `", "`").replace("|", "\\|"), " ".join(facts).replace(
        "|", "\\|"
    )


def environment_page() -> str:
    """Return the page of every environment variable."""
    from arb_ternary import environment
    from arb_ternary.plugins.manager import manager

    rows = [
        (
            f"`{variable.name}`",
            f"`{variable.default}`" if variable.default else "empty",
            prose(variable.summary),
        )
        for variable in manager().variables
    ]
    return "\n\n".join(
        [
            "# Environment variables",
            prose(inspect.getdoc(environment) or ""),
            table(("variable", "unset means", "meaning"), rows),
            "A variable that begins with `ARB_` and is not in the table has no effect; `arb "
            "doctor` points it out. "
            "Colour follows `NO_COLOR`, which the terminal library reads by itself.",
        ]
    )


def errors_page() -> str:
    """Return the page of error classes and exit codes."""
    from arb_ternary import errors

    codes = [
        ("0", "the command did what it was asked to do"),
        (
            "1",
            "a failure: a check that did not pass, damaged data, a component that breaks its "
            "protocol",
        ),
        ("2", "usage: a wrong command line, config or environment variable"),
        (
            "3",
            "environment: a backend, plugin or package that was named is missing or cannot work "
            "here",
        ),
        ("130", "interrupted; a run has saved a checkpoint first"),
    ]
    parts = [
        "# Errors and exit codes",
        prose(inspect.getdoc(errors) or ""),
        table(("exit code", "meaning"), codes),
    ]
    for name in public_names(errors):
        found = getattr(errors, name)
        if isinstance(found, type):
            parts.append(f"## `{name}`\n\nExit code {found.exit_code}. {docstring(found)}")
        else:
            parts.append(
                f"## `{name}`\n\n```python\n{signature(name, found)}\n```\n\n{docstring(found)}"
            )
    return "\n\n".join(parts)


def protocols_page() -> str:
    """Return the page of component protocols, and of the records that pass between both sides."""
    modules = {
        "Kernel backends": "arb_ternary.backends.protocol",
        "Optimizers": "arb_ternary.optim.protocol",
        "Data and masking": "arb_ternary.protocols.data",
        "Phases": "arb_ternary.protocols.runs",
        "Training": "arb_ternary_train.protocols",
        "Optional attributes": "arb_ternary_train.capabilities",
        "Step policies": "arb_ternary_train.policy",
        "Exporters and importers": "arb_ternary_interchange.protocols",
    }
    parts = [
        "# Component protocols",
        "What a factory returns. A run checks it once, when the component is built.",
    ]
    for title, name in modules.items():
        module = import_module(name)
        parts.append(f"## {title}\n\nModule `{name}`. {prose(inspect.getdoc(module) or '')}")
        parts += [name_text(public, getattr(module, public)) for public in public_names(module)]
    return "\n\n".join(parts)


def building_blocks_page() -> str:
    """Return the page of the classes and functions that plugins are built from."""
    parts = [
        "# Building blocks for plugins",
        "Classes to derive from, and what the parts of a plugin call or are given. "
        "[Component protocols](protocols.md) are what a component must implement.",
    ]
    for title, name, names in BUILDING_BLOCKS:
        module = import_module(name)
        parts.append(f"## {title}\n\nModule `{name}`. {prose(inspect.getdoc(module) or '')}")
        parts += [name_text(public, getattr(module, public)) for public in names]
    return "\n\n".join(parts)


def name_text(name: str, found: Any) -> str:
    """Return the section of a class, function or constant."""
    if isinstance(found, type):
        return class_text(name, found)
    if callable(found):
        shown = signature(name, found)
        return f"### `{name}`\n\n```python\n{shown}\n```\n\n{docstring(found)}"
    return f"### `{name}`\n\n`{found!r}`"


def class_text(name: str, cls: type[Any]) -> str:
    """Return the text of a class with its constructor, its fields and its methods."""
    from arb_ternary.config.options import HELP

    parts = [f"### `{name}`", docstring(cls)]
    if attrs.has(cls):
        is_config = all(HELP in each.metadata for each in attrs.fields(cls))
        if is_config:
            # Its links are those of the pages of config keys.
            parts.append(re.sub(r"\]\((\w+\.md)\)", r"](config/\1)", option_table(cls)))
        else:
            parts.append(attribute_list(cls))
    elif inspect.isfunction(vars(cls).get("__init__")) and not getattr(cls, "_is_protocol", False):
        constructor = vars(cls)["__init__"]
        call = signature(name, constructor, skip=("self",)).removesuffix(" -> None")
        parts.append(f"```python\n{call}\n```")
    for method, member in vars(cls).items():
        inherits_text = member.__doc__ is None and bool(inspect.getdoc(member))
        if method.startswith("_") or inherits_text:
            continue
        if isinstance(member, property):
            assert member.fget is not None
            result = inspect.signature(member.fget).return_annotation
            text = f"```python\n{method}: {result}\n```\n\n{docstring(member)}"
        elif inspect.isfunction(member):
            shown = signature(method, member, skip=("self",))
            text = f"```python\n{shown}\n```\n\n{docstring(member)}"
        else:
            continue
        parts.append(text.strip())
    return "\n\n".join(parts)


def kernels_page() -> str:
    """Return the page of kernel signatures and op schemas."""
    import torch

    from arb_ternary.backends import ops
    from arb_ternary.backends.protocol import OPTIONAL_OPS, REQUIRED_OPS
    from arb_ternary.backends.reference import build
    from arb_ternary.backends.vote_state import VoteLimits, VoteState
    from arb_ternary_vision import convolution_ops  # noqa: F401  (registers its own)

    kernels = build().kernels
    parts = [
        "# Kernels and ops",
        "## Kernels",
        "What the `kernels` mapping of a backend holds, with the signatures of the torch backend. "
        "A kernel changes only the tensors that its docstring names.",
    ]
    for op in (*REQUIRED_OPS, *OPTIONAL_OPS):
        status = "required" if op in REQUIRED_OPS else "optional: the torch backend is used instead"
        parts.append(
            f"### `{op}`\n\n{status[0].upper()}{status[1:]}.\n\n"
            f"```python\n{signature(op, kernels[op])}\n```\n\n"
            f"{docstring(kernels[op])}"
        )
    parts += ["## State", class_text("VoteState", VoteState), class_text("VoteLimits", VoteLimits)]
    parts += ["## Ops", prose(inspect.getdoc(ops) or "")]
    names = sorted(
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if "arb_ternary::" in name
    )
    for name in names:
        schema = getattr(torch.ops.arb_ternary, name).default._schema
        parts.append(f"### `arb_ternary::{name}`\n\n```\n{schema}\n```")
    return "\n\n".join(parts)


def api_page() -> str:
    """Return the page of the Python API.

    It has the names of ``import arb_ternary``, those for training outside of a run, and the
    conformance kit.
    """
    import arb_ternary
    import arb_ternary_testing
    from arb_ternary.config import options as config_options
    from arb_ternary_train import audit, update
    from arb_ternary_vision import convolution

    parts = ["# Python API", prose(inspect.getdoc(arb_ternary) or "")]
    for title, module in (
        ("Package `arb_ternary`", arb_ternary),
        ("Options of config classes: `arb_ternary.config.options`", config_options),
        ("A training loop of your own: `arb_ternary_train.update`", update),
        ("What a model stores: `arb_ternary_train.audit`", audit),
        ("Convolutions: `arb_ternary_vision.convolution`", convolution),
        ("Conformance kit: `arb_ternary_testing`", arb_ternary_testing),
    ):
        parts.append(f"## {title}")
        for name in getattr(module, "__all__", None) or public_names(module):
            found = getattr(module, name)
            if isinstance(found, type):
                arguments = found.__init__ if "__init__" in vars(found) else None
                call = (
                    signature(name, arguments, skip=("self",)).removesuffix(" -> None")
                    if arguments
                    else ""
                )
                shown = f"```python\n{call}\n```\n\n" if call else ""
                parts.append(f"### `{name}`\n\n{shown}{docstring(found)}")
            elif inspect.isfunction(found) and not found.__module__.startswith("arb_ternary"):
                parts.append(
                    f"### `{name}`\n\n`{found.__module__.replace('attr.', 'attrs.')}.{name}`, for "
                    f"convenience."
                )
            elif inspect.isfunction(found):
                parts.append(
                    f"### `{name}`\n\n```python\n{signature(name, found)}\n```\n\n"
                    f"{docstring(found)}"
                )
            elif isinstance(found, str | tuple):
                parts.append(f"### `{name}`\n\n`{found!r}`")
            else:
                facts = f": {found.text}" if hasattr(found, "text") else ""
                parts.append(f"### `{name}`\n\nA `{type(found).__name__}`{facts}.")
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Return all pages: Markdown by path below ``reference/``."""
    return {
        "hooks.md": hooks_page(),
        "specs.md": specs_page(),
        "environment.md": environment_page(),
        "errors.md": errors_page(),
        "protocols.md": protocols_page(),
        "building-blocks.md": building_blocks_page(),
        "kernels.md": kernels_page(),
        "formats.md": formats_page(
            components("model"), components("exporter"), components("importer")
        ),
        "api.md": api_page(),
        **config_pages(),
        **command_pages(),
    }


if __name__ == "__main__":
    # Variables that a person has set must not show in the pages.
    for variable in [name for name in os.environ if name.startswith("ARB_")]:
        del os.environ[variable]
    os.environ["COLUMNS"] = "100"
    json.dump(pages(), sys.stdout)
