"""The options of a config class: its attrs fields with their types resolved."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
from attrs import frozen

from arb_ternary.config.options import DEFAULT_CHOICE, HELP
from arb_ternary.errors import ComponentError

__all__ = ["ConfigField", "config_fields"]


@frozen(eq=False)
class ConfigField:
    """An option of a config class."""

    attribute: attrs.Attribute[Any]
    type: Any

    @property
    def key(self) -> str:
        """What files and ``__init__`` call the option."""
        return str(self.attribute.alias)

    @property
    def help(self) -> str:
        """One line of help; empty when the class gives none."""
        return str(self.attribute.metadata.get(HELP, ""))

    @property
    def default_choice(self) -> str | None:
        """The component that stands in when the file names none."""
        name = self.attribute.metadata.get(DEFAULT_CHOICE)
        return None if name is None else str(name)

    @property
    def required(self) -> bool:
        """Whether a file must have the option."""
        return self.attribute.default is attrs.NOTHING and self.default_choice is None

    def default_for(self, instance: Any) -> Any:
        """The default; ``instance`` is what a factory with ``takes_self`` is given."""
        default: Any = self.attribute.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            return default.factory(instance) if default.takes_self else default.factory()
        return default

    def convert(self, value: Any, instance: Any) -> Any:
        """``value`` after the field's converter."""
        converter: Any = self.attribute.converter
        if converter is None:
            return value
        if isinstance(converter, attrs.Converter):
            return converter(value, instance, self.attribute)  # type: ignore[operator]
        return converter(value)


def config_fields(cls: Any) -> tuple[ConfigField, ...]:
    """The options of ``cls``, in the order of its definition.

    Raises:
        ComponentError: an annotation does not resolve at run time.
    """
    return _resolve(cls)


@cache
def _resolve(cls: type[Any]) -> tuple[ConfigField, ...]:
    try:
        attrs.resolve_types(cls, include_extras=False)
    except (NameError, AttributeError) as error:
        raise ComponentError(
            f"{cls.__module__}.{cls.__qualname__}: the type of an option does not resolve: {error}",
            hint="Types of options are needed at run time: import them outside `if TYPE_CHECKING:`.",
        ) from error
    return tuple(ConfigField(attribute, attribute.type) for attribute in attrs.fields(cls) if attribute.init)
