"""Print the public surface: what other people's code, configs and scripts rely on.

``python tests/surface/surface.py --write`` replaces ``surface.txt`` in the same folder, the one
snapshot of what is registered, and the table ``arb_ternary.known`` of the root ``pyproject.toml``,
which follows from it. Without ``--write`` it prints the surface.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click

SNAPSHOT = Path(__file__).with_name("surface.txt")
ROOT = Path(__file__).parents[2]


def describe() -> str:
    """Return every public name, spec field, hook, environment variable, command and config key.

    Each is a line of its own.
    """
    sections = {
        "names of arb_ternary": _names("arb_ternary"),
        "names of arb_ternary.config.options": _names("arb_ternary.config.options"),
        "names of arb_ternary_testing": _names("arb_ternary_testing"),
        "names of arb_ternary_train.audit": _names("arb_ternary_train.audit"),
        "names of arb_ternary_train.update": _names("arb_ternary_train.update"),
        "names of arb_ternary_vision.convolution": _names("arb_ternary_vision.convolution"),
        "names of the protocols": _protocols(),
        "specs": _specs(),
        "hooks": _hooks(),
        "ops": _ops(),
        "errors": _errors(),
        "environment variables": _variables(),
        "components": _components(),
        "commands": _commands(),
        "config keys": _config_keys(),
    }
    return "\n".join(
        line for title, lines in sections.items() for line in (f"[{title}]", *lines, "")
    )


def _import(name: str) -> Any:
    from importlib import import_module

    return import_module(name)


def _kinds() -> dict[str, Any]:
    return dict(_import("arb_ternary.plugins.manager").manager().registry.kinds)


def _names(module: str) -> Iterator[str]:
    found = _import(module)
    yield from sorted(getattr(found, "__all__", None) or _defined(found))


def _defined(module: Any) -> list[str]:
    """Return the public names that a module itself defines, sorted."""
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    constants = {name for name in vars(module) if name.isupper()} - {"TYPE_CHECKING"}
    return sorted(name for name in {*own, *constants} if not name.startswith("_"))


def _protocols() -> Iterator[str]:
    modules = {
        "backends": "arb_ternary.backends.protocol",
        "data": "arb_ternary.protocols.data",
        "optim": "arb_ternary.optim.protocol",
        "runs": "arb_ternary.protocols.runs",
        "train": "arb_ternary_train.protocols",
        "interchange": "arb_ternary_interchange.protocols",
    }
    for name, path in modules.items():
        module = _import(path)
        for public in _defined(module):
            found = getattr(module, public)
            if isinstance(found, type) and attrs.has(found):
                yield f"{name}.{public}({', '.join(field.name for field in attrs.fields(found))})"
            elif isinstance(found, type):
                members = sorted(member for member in vars(found) if not member.startswith("_"))
                yield f"{name}.{public}: {', '.join(members)}"
            else:
                yield f"{name}.{public}"


def _specs() -> Iterator[str]:
    for found in _kinds().values():
        fields = [
            field.name if field.default is attrs.NOTHING else f"{field.name}="
            for field in attrs.fields(found)
        ]
        yield f"{found.__module__}.{found.__name__}({', '.join(fields)})"


def _hooks() -> Iterator[str]:
    yield f"API version {_import('arb_ternary').API_VERSION}"
    for kind in _kinds().values():
        yield f"{kind.hook}() -> {kind.__name__} [{kind.kind}: {kind.noun}]"
    registering = {kind.hook for kind in _kinds().values()}
    for function in _import("arb_ternary.plugins.manager").manager().hooks:
        if function.__name__ not in registering:
            first_result = " [first result]" if function.arb_ternary_spec["firstresult"] else ""
            parameters = ", ".join(inspect.signature(function).parameters)
            yield f"{function.__name__}({parameters}){first_result}"


def _ops() -> Iterator[str]:
    protocol = _import("arb_ternary.backends.protocol")
    kernels = _import("arb_ternary.backends.reference").build().kernels
    for op in (*protocol.REQUIRED_OPS, *protocol.OPTIONAL_OPS):
        optional = " [optional]" if op in protocol.OPTIONAL_OPS else ""
        yield f"{op}({', '.join(inspect.signature(kernels[op]).parameters)}){optional}"
    yield from (f"{op} [combined]" for op in protocol.COMBINED_OPS)
    wire = _import("arb_ternary_distributed.wire").WIRE_KERNELS
    for op, kernel in wire.items():
        yield f"{op}({', '.join(inspect.signature(kernel).parameters)})"
    yield _import("arb_ternary_votes.levels").SUMS_TO_QUANTA
    yield from _import("arb_ternary_vision.convolution_ops").CONVOLUTION_OPS
    yield from (
        op
        for op in _import("arb_ternary_text.models.block_kernels").BLOCK_OPS
        if op.startswith("text.")
    )
    native_decode = _import("arb_ternary_text.models.native_decode")
    yield native_decode.DECODE_ROWS
    yield native_decode.DECODE_STEP


def _errors() -> Iterator[str]:
    errors = _import("arb_ternary.errors")
    for name in _defined(errors):
        found = getattr(errors, name)
        yield f"{name}: exit code {found.exit_code}" if isinstance(found, type) else name


def _variables() -> Iterator[str]:
    for variable in _import("arb_ternary.plugins.manager").manager().variables:
        yield f"{variable.name}={variable.default}"


# --- what the distributions of this repository register


def _workspace() -> frozenset[str]:
    files = [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    files += ROOT.glob("backends/*/pyproject.toml")
    return frozenset(
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files
    )


def _registered(kind: str) -> list[Any]:
    mine = _workspace()
    registry = _import("arb_ternary.plugins.manager").manager().registry
    return [found for found in registry.all(kind) if found.distribution in mine]


def _components() -> Iterator[str]:
    for kind in _kinds():
        for found in _registered(kind):
            yield f"{kind} {found.name}: {found.distribution}"
    registry = _import("arb_ternary.plugins.manager").manager().registry
    for record, document in registry.results("arb_register_documents"):
        if record.distribution in _workspace():
            yield f"document {document.name}: {record.distribution}"
    for name, distribution in sorted(_names_of_the_core().items()):
        yield f"name {name}: {distribution}"


def _names_of_the_core() -> dict[str, str]:
    """Return the public names of ``arb_ternary`` that a distribution adds, and which one does."""
    found = {}
    for file in ROOT.glob("*/arb-ternary-*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for name in project.get("entry-points", {}).get("arb_ternary.names", {}):
            found[name] = project["name"]
    return found


def known_tables(surface: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tables ``arb_ternary.known`` that follow from the surface: names, components.

    It says which distribution brings a component, for messages about names that are not installed.
    Components of the core need no entry. Those with a dotted name have one per family, except
    commands, which stand in groups.
    Public names stand in the core's own ``pyproject.toml``, all others in that of the metapackage.
    """
    components = surface.partition("[components]\n")[2].partition("\n[")[0]
    table = {}
    for kind, name, distribution in re.findall(r"^(\S+) (.+): (\S+)$", components, re.MULTILINE):
        if distribution == "arb-ternary-core":
            continue
        known = name if kind == "command" else name.partition(".")[0]
        table[f"{kind}.{known}"] = distribution.replace("-", "_")
    names = {key: table.pop(key) for key in sorted(table) if key.startswith("name.")}
    return names, dict(sorted(table.items()))


def write_known_table(file: Path, table: dict[str, str]) -> None:
    """Replace the table in a ``pyproject.toml``."""
    heading = '[project.entry-points."arb_ternary.known"]\n'
    before, _, after = file.read_text(encoding="utf-8").partition(heading)
    rest = after[after.index("\n\n") :]
    lines = [f'"{name}" = "{module}"' for name, module in table.items()]
    file.write_text(before + heading + "\n".join(lines) + rest, encoding="utf-8")


def _commands() -> Iterator[str]:
    yield from _command(_import("arb_ternary.cli.main").arb, "arb", deep=False)
    for found in _registered("command"):
        yield from _command(found.load(), f"arb {found.name.replace('.', ' ')}")


def _command(command: click.Command, path: str, *, deep: bool = True) -> Iterator[str]:
    parts = [path]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            parts.append((parameter.name or "").upper())
        else:
            parts.append("/".join([*parameter.opts, *parameter.secondary_opts]))
    yield " ".join(parts)
    if deep and isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _command(command.commands[name], f"{path} {name}")


def _config_keys() -> Iterator[str]:
    structure = _import("arb_ternary.config.structure")
    yield from _keys(_import("arb_ternary_train.config").RunConfig, "")
    for kind in _kinds():
        if kind in ("backend", "command", "starter"):
            continue
        for found in _registered(kind):
            cls = structure.options_class(found.spec)
            if cls is not None:
                yield from _keys(cls, f"{kind} {found.name}: ")


def _keys(cls: type[Any], prefix: str) -> Iterator[str]:
    fields = _import("arb_ternary.config.fields")
    yaml = _import("arb_ternary.config.yaml_document")
    for field in fields.config_fields(cls):
        if fields.shape_of(field.type) == "class":
            yield from _keys(field.type, f"{prefix}{field.alias}.")
        elif fields.is_required(field):
            yield f"{prefix}{field.alias} (required)"
        else:
            yield f"{prefix}{field.alias} = {yaml.dump_inline(fields.default_of(field))}"


def main() -> None:
    """Print the surface, or write the snapshot and the table that follows from it."""
    for variable in [name for name in os.environ if name.startswith("ARB_")]:
        del os.environ[variable]
    text = describe()
    if sys.argv[1:] == ["--write"]:
        SNAPSHOT.write_text(text, encoding="utf-8")
        names, others = known_tables(text)
        write_known_table(ROOT / "core" / "pyproject.toml", names)
        write_known_table(ROOT / "pyproject.toml", others)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
