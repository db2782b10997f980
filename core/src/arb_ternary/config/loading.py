"""From a config file to a structured config: read, override, structure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
from attrs import field, frozen

from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.paths import DEFAULT, Origin, Path, parse_path
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document, read_yaml
from arb_ternary.errors import ConfigError

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

__all__ = ["LoadedConfig", "load_as", "read_document", "value_origins"]

T = TypeVar("T")


@frozen(eq=False)
class LoadedConfig(Generic[T]):
    """A config and where it came from.

    Attributes:
        config: the structured config.
        raw: the plain values that it was made from, after overrides.
        origins: where each value of ``to_plain(config)`` came from, by path.
        source: the file, as the user named it.
        summary: what it describes, in a few words; empty when there is nothing to say.
    """

    config: T
    raw: dict[str, Any]
    origins: Mapping[Path, Origin] = field(factory=dict)
    source: str = ""
    summary: str = ""

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
    """Read a YAML file.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    file, source = FilePath(path), os.fspath(path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{source}: a config is a file ending in .yaml, .yml")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file", hint=f"arb config new {source}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise ConfigError(f"{source}: cannot be read: {reason}") from error
    return read_yaml(text.removeprefix("\ufeff"), source)


def load_as(
    cls: type[T], path: str | os.PathLike[str], overrides: Iterable[str] = (), *, registry: Registry | None = None
) -> LoadedConfig[T]:
    """Load a file whose top level is the config class ``cls``.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed.
        EnvironmentProblem: it names components that are not installed.
    """
    from arb_ternary.plugins.manager import manager

    document = apply_overrides(read_document(path), overrides)
    config = structure(cls, document, manager().registry if registry is None else registry)
    return LoadedConfig(config, document.data, value_origins(config, document), document.source)


def value_origins(
    config: Any, document: Document, derived: Mapping[Path, Origin] = MappingProxyType({})
) -> dict[Path, Origin]:
    """The origin of every value of a structured config, by its path in ``to_plain(config)``.

    Args:
        config: an instance of a config class.
        document: what it was made from.
        derived: origins of values that follow from others.
    """
    assert attrs.has(type(config))
    origins = dict(derived)
    for path, value in leaves(to_plain(config, given=False)):
        if path in derived:
            continue
        # A component that is given by its name alone has no entry for the name.
        own = path if path in document.origins or path[-1:] != ("name",) else path[:-1]
        parts = [own, *((*own, index) for index in range(len(value)))] if isinstance(value, list) else [own]
        found = dict.fromkeys(document.origins[part] for part in parts if part in document.origins)
        origins[path] = max(found, key=lambda origin: (origin.kind == "override", origin.order), default=DEFAULT)
    return origins
