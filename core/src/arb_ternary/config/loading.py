"""From a config file to a :class:`RunConfig`: read, override, check requirements, structure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Generic, Protocol, TypeVar

import attrs
from attrs import evolve, field, frozen

from arb_ternary import environment
from arb_ternary.config.document import Document
from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.json_document import read_json
from arb_ternary.config.overrides import apply_overrides, set_value
from arb_ternary.config.paths import DEFAULT, Origin, Path, find_origin, parse_path
from arb_ternary.config.plain import leaves, to_plain
from arb_ternary.config.requirements import unmet_requirements
from arb_ternary.config.run import RunConfig, apply_exact, exact_faults
from arb_ternary.config.structure import GIVEN, Registry, structure, structure_with_faults
from arb_ternary.config.toml_document import read_toml
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem

__all__ = ["LoadedConfig", "PluginHost", "load_as", "load_config", "read_document", "structure_run"]

T = TypeVar("T")

_READERS: Mapping[str, Callable[[str, str], Document]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": read_json,
    ".toml": read_toml,
}


class PluginHost(Protocol):
    """The part of the plugin manager that loading needs."""

    @property
    def registry(self) -> Registry: ...

    def load_file(self, path: FilePath, /) -> Any: ...


@frozen(eq=False)
class LoadedConfig(Generic[T]):
    """A config and where it came from.

    Attributes:
        config: the structured config.
        raw: the plain values that it was made from, after overrides.
        origins: where each value of ``to_plain(config)`` came from, by path.
        source: the file, as the user named it.
    """

    config: T
    raw: dict[str, Any]
    origins: Mapping[Path, Origin] = field(factory=dict)
    source: str = ""

    def origin(self, path: str | Path) -> Origin:
        """Where the value at ``path`` (``"phases[0].steps"``) came from.

        Raises:
            KeyError: the config has no such value.
        """
        parts = parse_path(path) if isinstance(path, str) else path
        if parts is None or parts not in self.origins:
            raise KeyError(path)
        return self.origins[parts]


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read a YAML, JSON or TOML file; the ending of its name says which.

    Raises:
        ConfigError: the file cannot be read or is not what its ending says.
    """
    file, source = FilePath(path), os.fspath(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{source}: a config is a file ending in {', '.join(sorted(_READERS))}")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file", hint=f"arb config new {source}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise ConfigError(f"{source}: cannot be read: {reason}") from error
    return reader(text.removeprefix("\ufeff"), source)


def load_as(
    cls: type[T], path: str | os.PathLike[str], overrides: Iterable[str] = (), *, registry: Registry | None = None
) -> LoadedConfig[T]:
    """Load a file whose top level is the config class ``cls``.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed.
        EnvironmentProblem: it names components that are not installed.
    """
    document = apply_overrides(read_document(path), overrides)
    config = structure(cls, document, registry if registry is not None else _plugins().registry)
    return LoadedConfig(config, document.data, _value_origins(config, document, ()), document.source)


def load_config(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), *, plugins: PluginHost | None = None
) -> LoadedConfig[RunConfig]:
    """Load the config of a run.

    In order of precedence, a value comes from ``overrides``, from the environment (``ARB_TERNARY_BACKEND``), from the
    file, or is a default. The config's own plugin files are loaded into ``plugins`` first.

    Args:
        path: a YAML, JSON or TOML file.
        overrides: ``path=value`` each, as given to ``-o``.
        plugins: where components come from; the process-wide plugin manager when None.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed with file and line.
        EnvironmentProblem: the config is right, but names what is not installed or failed to load.
    """
    host = plugins if plugins is not None else _plugins()
    document = _apply_environment(apply_overrides(read_document(path), overrides))
    document = _load_plugin_files(document, FilePath(path).parent, host)
    return structure_run(document, host.registry)


def structure_run(document: Document, registry: Registry) -> LoadedConfig[RunConfig]:
    """Structure the document of a run, check its requirements, and apply ``exact``.

    Raises:
        InvalidConfig, ConfigEnvironmentProblem: as :func:`load_config`.
    """
    config, faults = structure_with_faults(RunConfig, document, registry)
    faults.extend(unmet_requirements(_texts(document, "requires")))
    faults.extend(exact_faults(*_exact_and_given(document.data)))
    if faults or config is None:
        raise_faults(faults, document.origins, document.source)
    resolved = apply_exact(config, document.origins, document.source)
    before = dict(leaves(to_plain(config)))
    changed = [path for path, value in leaves(to_plain(resolved)) if before[path] != value]
    return LoadedConfig(resolved, document.data, _value_origins(resolved, document, changed), document.source)


def _plugins() -> PluginHost:
    from arb_ternary.plugins.manager import manager

    return manager()


def _exact_and_given(data: Any) -> tuple[bool, Mapping[str, Any]]:
    """What the user said about exactness: read from plain values, so that other faults do not hide a contradiction."""
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or data.get("exact") is not True:
        return False, {}
    given = model.get(GIVEN)
    return True, {key: model[key] for key in given if key in model} if isinstance(given, list) else model


def _texts(document: Document, key: str) -> list[str]:
    """The list of texts at a key of the top level; empty when it is not one, which structuring reports."""
    value = document.data.get(key) if isinstance(document.data, dict) else None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


def _apply_environment(document: Document) -> Document:
    name = "ARB_TERNARY_BACKEND"
    value = environment.given().get(name, "").strip()
    origin = document.origins.get(("backend",))
    if not value or (origin is not None and origin.kind == "override"):
        return document
    return set_value(document, ("backend",), value, Origin("environment", name))


def _load_plugin_files(document: Document, folder: FilePath, plugins: PluginHost) -> Document:
    """Load the files under ``plugins:``, and make their paths absolute, so that a resolved config works anywhere."""
    files = _texts(document, "plugins")
    faults = list(document.faults)
    for index, text in enumerate(files):
        origin = find_origin(document.origins, ("plugins", index))
        is_typed = origin is not None and origin.kind == "override"
        files[index] = str(((FilePath() if is_typed else folder) / text).resolve())
        try:
            plugins.load_file(FilePath(files[index]))
        except ArbError as error:
            missing = isinstance(error, EnvironmentProblem)
            faults.append(Fault(("plugins", index), error.what, error.hint, environment=missing))
    return evolve(document, faults=tuple(faults))


def _value_origins(config: Any, document: Document, derived: Sequence[Path]) -> dict[Path, Origin]:
    """The origin of every value of a structured config."""
    assert attrs.has(type(config))
    origins = {}
    for path, value in leaves(to_plain(config, given=False)):
        if path in derived:
            cause = find_origin(document.origins, ("exact",))
            origins[path] = Origin("derived", f"exact ({cause})")
            continue
        # A component that is given by its name alone has no entry for the name.
        own = path if path in document.origins or path[-1:] != ("name",) else path[:-1]
        parts = [own, *((*own, index) for index in range(len(value)))] if isinstance(value, list) else [own]
        found = dict.fromkeys(document.origins[part] for part in parts if part in document.origins)
        last = max(found, key=lambda origin: (origin.kind == "override", origin.order), default=DEFAULT)
        origins[path] = last
    return origins
