"""Make the reference pages of the site.

They are made when the site is built and are not committed. Of Python code a page has directives of
mkdocstrings, and of commands those of mkdocs-click. Options of components are known when plugins
are loaded only, so their tables are made here.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click

import arb_ternary
import arb_ternary_testing
from arb_ternary import environment, errors
from arb_ternary.backends import reference
from arb_ternary.backends.protocol import OPTIONAL_OPS, REQUIRED_OPS
from arb_ternary.cli.main import arb
from arb_ternary.config.fields import config_fields, default_of, is_required, shape_of
from arb_ternary.config.options import HELP
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_inline
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.registry import Registry
from arb_ternary.specs import resolve
from arb_ternary_train.config import RunConfig
from formats import formats_page
from render import prose, rules, table, type_text

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
#: What plugins derive from, call or are given, beyond the protocols: names by module.
BUILDING_BLOCKS = {
    "arb_ternary.optim.ternary": "TernaryOptimizer VoteUpdate",
    "arb_ternary.ternary.module": "TernaryModule VoteOptions",
    "arb_ternary.ternary.vote_memory": "VoteMemory",
    "arb_ternary.ternary.models": "ternary_modules seed_votes",
    "arb_ternary.counters.hashing": "counter_hash uniform hash_words",
    "arb_ternary_train.standard": "StandardPhase log_and_evaluate",
    "arb_ternary_train.options": "LoopOptions StandardConfig",
    "arb_ternary_train.context": "TrainingContext",
    "arb_ternary_train.loop": "TrainingLoop",
    "arb_ternary_train.step": "StepReport Skip StepResult",
    "arb_ternary_train.loop_state": "Snapshot",
    "arb_ternary_text.data.files": "Text read_utf8 text_source split_source",
    "arb_ternary_text.data.loader": "SampledBatches",
    "arb_ternary.plugins.manager": "manager reset_manager Plugins",
}
#: Protocols of components, and the records that pass between both sides.
PROTOCOLS = (
    "arb_ternary.backends.protocol",
    "arb_ternary.optim.protocol",
    "arb_ternary.protocols.data",
    "arb_ternary.protocols.runs",
    "arb_ternary_train.protocols",
    "arb_ternary_train.capabilities",
    "arb_ternary_train.policy",
    "arb_ternary_interchange.protocols",
)
#: Modules for programs that use the library.
API = (
    "arb_ternary.config.options",
    "arb_ternary_train.update",
    "arb_ternary_train.audit",
    "arb_ternary_vision.convolution",
)
EXIT_CODES = (
    ("0", "the command did what it was asked to do"),
    (
        "1",
        "a failure: a check that did not pass, damaged data, a component that breaks its protocol",
    ),
    ("2", "usage: a wrong command line, config or environment variable"),
    ("3", "environment: something that was named is missing or cannot work here"),
    ("130", "interrupted; a run has saved a checkpoint first"),
)


def pages() -> dict[str, str]:
    """Return all pages: Markdown by path below ``reference/``."""
    return {
        "hooks.md": page(
            "Hooks", "`arb plugins hooks` prints this list.", ["arb_ternary.hookspecs"]
        ),
        "specs.md": page("Specs", "What registration hooks return.", ["arb_ternary.specs"]),
        "environment.md": environment_page(),
        "errors.md": errors_page(),
        "protocols.md": page(
            "Component protocols",
            "What a factory returns. A run checks it once, when the component is built.",
            PROTOCOLS,
        ),
        "building-blocks.md": page(
            "Building blocks for plugins",
            "Classes to derive from, and what the parts of a plugin call or are given. "
            "[Component protocols](protocols.md) are what a component must implement.",
            building_blocks(),
        ),
        "kernels.md": kernels_page(),
        "formats.md": formats_page(
            components("model"), components("exporter"), components("importer")
        ),
        "api.md": page(
            "Python API", prose(inspect.getdoc(arb_ternary) or ""), [*public_names(), *API]
        ),
        **config_pages(),
        **command_pages(),
    }


def page(title: str, text: str, identifiers: Iterable[str]) -> str:
    """Return a page with the documentation of modules, classes and functions."""
    directives = [f"::: {identifier}" for identifier in identifiers]
    return "\n\n".join([f"# {title}", text, *directives])


def public_names() -> Iterator[str]:
    """Yield where the public names of the program and of the conformance kit are defined."""
    for package in (arb_ternary, arb_ternary_testing):
        for name in package.__all__:
            found = getattr(package, name)
            is_defined = inspect.isclass(found) or inspect.isfunction(found)
            module = found.__module__ if is_defined else package.__name__
            yield f"{module}.{name}"


def building_blocks() -> Iterator[str]:
    """Yield where the building blocks are defined."""
    for module, names in BUILDING_BLOCKS.items():
        for name in names.split():
            yield f"{module}.{name}"


def errors_page() -> str:
    """Return the page of error classes and exit codes."""
    rows = []
    for code, meaning in EXIT_CODES:
        classes = []
        for name, found in vars(errors).items():
            if inspect.isclass(found) and str(getattr(found, "exit_code", None)) == code:
                classes.append(f"`{name}`")
        rows.append((code, ", ".join(classes), meaning))
    codes = table(("exit code", "errors", "meaning"), rows)
    return page("Errors and exit codes", codes, ["arb_ternary.errors"])


def environment_page() -> str:
    """Return the page of every environment variable."""
    rows = [
        (f"`{each.name}`", f"`{each.default}`" if each.default else "empty", prose(each.summary))
        for each in manager().variables
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


def command_pages() -> dict[str, str]:
    """Return the pages of commands: the help of ``arb``, then one page per command or group."""
    context = click.Context(arb, info_name="arb", max_content_width=100)
    pages = {
        "commands/index.md": "# Commands\n\nExit codes are on the page [Errors](../errors.md).\n\n"
        f"## arb\n\n```text\n{arb.get_help(context)}\n```"
    }
    for found in components("command"):
        if "." not in found.name:
            parts = [command(found.spec.target, f"arb {found.name}")]
            if found.name == "generate":
                for generator in components("generator"):
                    path = f"arb generate --with {generator.name}"
                    parts.append(command(generator.spec.target, path))
            pages[f"commands/{found.name}.md"] = "\n\n".join(parts)
    return pages


def command(target: str, path: str) -> str:
    """Return the directive for the documentation of a command and its sub-commands."""
    module, _, attribute = target.partition(":")
    lines = [f":module: {module}", f":command: {attribute}", f":prog_name: {path}"]
    return "\n".join(["::: mkdocs-click", *(f"    {line}" for line in lines)])


def kernels_page() -> str:
    """Return the page of kernels and ops."""
    kernels = reference.build().kernels
    rows = []
    identifiers = []
    for op in (*REQUIRED_OPS, *OPTIONAL_OPS):
        function = inspect.unwrap(kernels[op])
        identifier = f"{function.__module__}.{function.__name__}"
        identifiers.append(identifier)
        status = "required" if op in REQUIRED_OPS else "optional"
        rows.append((f"`{op}`", status, f"[`{function.__name__}`][{identifier}]"))
    return page(
        "Kernels and ops",
        "What the `kernels` mapping of a backend holds, with the functions of the torch backend, "
        "which also stand in for optional ones.\n\n"
        + table(("kernel", "status", "function"), rows),
        [*identifiers, "arb_ternary.backends.vote_state", "arb_ternary.backends.ops"],
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


def config_pages() -> dict[str, str]:
    """Return the pages of config keys: the top level, then one page per kind of component."""
    listed = {kind: spec for kind, spec in Registry.kinds.items() if kind not in NOT_IN_CONFIGS}
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
    for field in config_fields(cls):
        path = f"{prefix}{field.alias}"
        yield path, field
        if shape_of(field.type) == "class":
            yield from options(field.type, f"{path}.")


def default_text(field: Any) -> str:
    """Return the default as a file would spell it."""
    if is_required(field):
        return "required"
    if attrs.has(field.type) and isinstance(default_of(field), dict):
        return "as below"
    return f"`{dump_inline(default_of(field))}`"


def help_text(field: Any) -> str:
    """Return the help text, and the rules of the validators."""
    text = field.metadata[HELP]
    demands = [demand for demand in rules(field.validator) if demand not in text]
    return prose(text).replace("|", "\\|") + (f" ({'; '.join(demands)})" if demands else "")
