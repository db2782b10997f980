"""Load a whole config file: read it, apply the overrides of the command line, and structure it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from arb_ternary.config.errors import Origin, Path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document, LoadedConfig, read_yaml
from arb_ternary.errors import ConfigError, nearest

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

T = TypeVar("T")
_DEFAULT = Origin("default", "default")


def load_as(
    cls: type[T],
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    registry: Registry | None = None,
) -> LoadedConfig[T]:
    """Load a file whose top level is the config class ``cls``.

    Args:
        cls: the config class.
        path: a YAML file.
        overrides: settings that replace those of the file, each ``path=value``.
        registry: where components come from; that of the process-wide plugins when None.

    Raises:
        ConfigError, EnvironmentProblem: as :func:`arb_ternary.config.errors.raise_faults`.
    """
    from arb_ternary.plugins.manager import manager

    if registry is None:
        registry = manager().registry
    document = apply_overrides(read_document(path), overrides)
    config = structure(cls, document, registry)
    return LoadedConfig(config, value_origins(config, document), document.source)


def read_document(path: str | os.PathLike[str], *, advice: str | None = None) -> Document:
    """Read a YAML file.

    Args:
        path: the file.
        advice: what to do if there is no such file; None = write a starter config.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    file = FilePath(path)
    source = os.fspath(path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{source}: a config is a file ending in .yaml, .yml")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = f"arb config new {source}" if advice is None else advice
        close = nearest(file.name, (other.name for other in file.parent.glob("*.y*ml")))
        if close is not None:
            hint = f"did you mean {file.with_name(close)}?\n{hint}"
        raise ConfigError(f"{source}: no such file", hint=hint) from None
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
        raise ConfigError(f"{source}: cannot be read: {reason}") from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    return read_yaml(text, source)


def value_origins(config: Any, document: Document) -> dict[Path, Origin]:
    """Return the origin of every value of ``config``, which was structured from ``document``.

    The keys are the paths of the values in ``to_plain(config)``.
    """
    return {
        path: _origin(path, value, document)
        for path, value in leaves(to_plain(config, given=False))
    }


def _origin(path: Path, value: Any, document: Document) -> Origin:
    """Return where a value came from: its last override, else its last line, else the default."""
    origins = document.origins
    own = path
    if path not in origins and path[-1:] == ("name",):
        own = path[:-1]  # a component that is given by its name alone has no entry for the name
    parts = [own]
    if isinstance(value, list):
        parts.extend((*own, index) for index in range(len(value)))
    found = [origins[part] for part in parts if part in origins]
    overrides = [origin for origin in found if origin.kind == "override"]
    return max(overrides or found, key=lambda origin: origin.order, default=_DEFAULT)
