"""From plain values to config classes: strict, and with every fault at once.

Types of options: ``str``, ``int``, ``float``, ``bool``, ``pathlib.Path``, ``Any``, ``Literal``, unions of these,
``None``, ``list``, ``tuple``, ``Sequence``, ``dict`` and ``Mapping`` (with text or whole-number keys), attrs classes,
and the choices of ``config.choice``, nested to any depth. Nothing is converted silently: text is not a number,
``true`` is not 1; only a whole number may stand where a number is asked for.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Protocol, TypeVar, get_args

import attrs
from cattrs import Converter

from arb_ternary.config.choice import Choice
from arb_ternary.config.describe import (
    describe_type,
    describe_value,
    is_choice,
    is_literal,
    is_mapping,
    is_sequence,
    is_union,
    origin_of,
)
from arb_ternary.config.document import Document
from arb_ternary.config.errors import Fault, Faulty, raise_faults
from arb_ternary.config.fields import ConfigField, config_fields
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import Spec, resolve

__all__ = ["GIVEN", "Registry", "make_converter", "options_class", "structure", "structure_with_faults"]

T = TypeVar("T")

#: Key beside the options of a component in a resolved config: which of them the user wrote.
GIVEN = "given"
#: Keys of a component's mapping that are not options.
RESERVED = frozenset({"name", GIVEN})


class RegisteredComponent(Protocol):
    """What the registry returns."""

    @property
    def spec(self) -> Spec: ...


class Registry(Protocol):
    """The part of the plugin registry that configs need."""

    def get(self, kind: str, name: str, /) -> RegisteredComponent:
        """The component, or UsageProblem (unknown) or EnvironmentProblem (known, but not here)."""
        ...

    def names(self, kind: str, /) -> Sequence[str]:
        """The names of a kind's components."""
        ...


def structure(cls: type[T], document: Document, registry: Registry) -> T:
    """Structure a whole document into ``cls``.

    Raises:
        InvalidConfig: with every fault, located.
        ConfigEnvironmentProblem: the only faults are components that are not installed or failed to load.
    """
    result, faults = structure_with_faults(cls, document, registry)
    if faults:
        raise_faults(faults, document.origins, document.source)
    assert result is not None
    return result


def structure_with_faults(cls: type[T], document: Document, registry: Registry) -> tuple[T | None, list[Fault]]:
    """As :func:`structure`, with the faults returned; the result is None when it could not be made."""
    faults = list(document.faults)
    try:
        result: T = make_converter(registry).structure(document.data, cls)
    except Faulty as error:
        return None, [*faults, *error.faults]
    return result, faults


def make_converter(registry: Registry) -> Converter:
    """A cattrs converter whose hooks raise :class:`Faulty` and look components up in ``registry``."""
    converter = Converter(detailed_validation=False, forbid_extra_keys=True)
    structurer = _Structurer(converter, registry)
    # The hook that was registered last is asked first; the first one keeps cattrs' own, lenient ones out.
    converter.register_structure_hook_func(lambda _: True, structurer.unsupported)
    for scalar in (bool, int, float, str, Path, NoneType):
        converter.register_structure_hook(scalar, structurer.scalar)
    converter.register_structure_hook_func(lambda t: t is Any or t is object, lambda value, _: value)
    converter.register_structure_hook_func(is_sequence, structurer.sequence)
    converter.register_structure_hook_func(is_mapping, structurer.mapping)
    converter.register_structure_hook_func(attrs.has, structurer.attrs_class)
    converter.register_structure_hook_func(is_choice, structurer.choice)
    converter.register_structure_hook_func(is_literal, structurer.scalar)
    converter.register_structure_hook_func(is_union, structurer.union)
    converter.register_structure_hook_func(
        lambda t: origin_of(t) is Annotated, lambda value, t: converter.structure(value, get_args(t)[0])
    )
    return converter


def options_class(spec: Spec) -> type[Any] | None:
    """The config class of a component; None when it takes no options.

    Raises:
        EnvironmentProblem: its module cannot be imported.
        ComponentError: it does not exist, is not an attrs class, or has an option with a reserved name.
    """
    if spec.config is None:
        return None
    what = f"{spec.kind} '{spec.name}': the config class {spec.config}"
    try:
        cls = resolve(spec.config)
    except AttributeError as error:
        raise ComponentError(f"{what} does not exist: {error}") from error
    except Exception as error:
        raise EnvironmentProblem(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise ComponentError(f"{what} is not an attrs class")
    for name in sorted(RESERVED & {field.key for field in config_fields(cls)}):
        raise ComponentError(f"{what} has an option '{name}', which is reserved", hint="Give the option another name.")
    return cls


def _same(value: Any, literal: Any) -> bool:
    return type(value) is type(literal) and bool(value == literal)


# --- hooks -----------------------------------------------------------------------------------------------------------


class _Structurer:
    """The hooks. Each takes a plain value and a type and returns the structured value or raises Faulty."""

    def __init__(self, converter: Converter, registry: Registry) -> None:
        self.converter = converter
        self.registry = registry

    def collect(self, faults: list[Fault], key: str | int, value: Any, t: Any) -> Any:
        """Structure a part; its faults go to ``faults``, and the result is then None."""
        try:
            return self.converter.structure(value, t)
        except Faulty as error:
            faults.extend(error.under(key))
        return None

    def unsupported(self, value: Any, t: Any) -> Any:
        raise ComponentError(f"a config class cannot have an option of type {t}")

    def scalar(self, value: Any, t: Any) -> Any:
        if is_literal(t):
            for literal in get_args(t):
                if _same(value, literal):
                    return literal
        elif t is NoneType and value is None:
            return None
        elif t is Path and isinstance(value, str):
            return Path(value)
        elif t is float and type(value) is int:
            return float(value)
        elif type(value) is t:
            return value
        raise _mismatch(value, t)

    def union(self, value: Any, t: Any) -> Any:
        # An arm of the value's own type first, so that 3 stays an int in `float | int`.
        arms = sorted(get_args(t), key=lambda arm: type(value) is not arm)
        compound = []
        for arm in arms:
            try:
                return self.converter.structure(value, arm)
            except Faulty as error:
                if _could_be(value, arm):
                    compound.append(error)
        if len(compound) == 1:
            raise compound[0]
        raise _mismatch(value, t)

    def sequence(self, value: Any, t: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _mismatch(value, t)
        arguments = get_args(t) or (Any, ...)
        faults: list[Fault] = []
        is_fixed = origin_of(t) is tuple and arguments[-1] is not Ellipsis
        if is_fixed and len(value) != len(arguments):
            raise Faulty.here(f"must have {len(arguments)} items, not {len(value)}")
        types = arguments if is_fixed else (arguments[0],) * len(value)
        items = [
            self.collect(faults, index, item, item_type)
            for index, (item, item_type) in enumerate(zip(value, types, strict=True))
        ]
        if faults:
            raise Faulty(faults)
        return items if origin_of(t) is list else tuple(items)

    def mapping(self, value: Any, t: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mismatch(value, t)
        key_type, value_type = get_args(t) or (str, Any)
        faults: list[Fault] = []
        result: dict[Any, Any] = {}
        for key, item in value.items():
            # TOML and JSON have only text for keys.
            actual = int(key) if key_type is int and isinstance(key, str) and re.fullmatch(r"-?\d+", key) else key
            self.collect(faults, key, actual, key_type)
            result[actual] = self.collect(faults, key, item, value_type)
        if faults:
            raise Faulty(faults)
        return result

    def attrs_class(self, value: Any, cls: type[Any]) -> Any:
        if not isinstance(value, Mapping):
            raise _mismatch(value, cls)
        return self.instance(value, cls, value.keys())

    def choice(self, value: Any, cls: type[Choice[Any]]) -> Choice[Any]:
        kind = cls.kind
        name_path: tuple[str, ...]
        if isinstance(value, str):
            value, name_path = {"name": value}, ()
        elif isinstance(value, Mapping):
            name_path = ("name",)
        else:
            raise _mismatch(value, cls)
        if "name" not in value:
            raise Faulty.here(f"needs the 'name' of the {cls.noun}: {self.names(kind)}")
        name = value["name"]
        if not isinstance(name, str):
            raise Faulty([Fault(("name",), f"must be the name of the {cls.noun}, not {describe_value(name)}")])
        try:
            spec = self.registry.get(kind, name).spec
            config = options_class(spec)
        except UsageProblem as error:
            raise Faulty([Fault(name_path, error.what, error.hint, unknown_component=True)]) from error
        except EnvironmentProblem as error:
            raise Faulty([Fault(name_path, error.what, error.hint, environment=True)]) from error
        keys = [key for key in value if key not in RESERVED]
        if config is None:
            if keys:
                raise Faulty([Fault((key,), f"unknown key; {cls.noun} '{name}' takes no options") for key in keys])
            options = None
        else:
            options = self.instance(value, config, keys)
        return cls(name, options, self.given(value, keys), spec)

    def given(self, value: Mapping[str, Any], keys: list[str]) -> frozenset[str]:
        if GIVEN not in value:
            return frozenset(keys)
        faults: list[Fault] = []
        given = self.collect(faults, GIVEN, value[GIVEN], tuple[str, ...])
        if not faults:
            faults = [
                Fault((GIVEN, index), f"'{key}' is not among the options here")
                for index, key in enumerate(given)
                if key not in keys
            ]
        if faults:
            raise Faulty(faults)
        return frozenset(given)

    def names(self, kind: str) -> str:
        return ", ".join(sorted(self.registry.names(kind))) or "none"

    def instance(self, value: Mapping[str, Any], cls: type[Any], keys: typing.Iterable[str]) -> Any:
        """An instance of ``cls`` from the entries ``keys`` of ``value``."""
        fields = {field.key: field for field in config_fields(cls)}
        faults = [Fault((key,), _unknown_key(key, fields)) for key in keys if key not in fields]
        arguments: dict[str, Any] = {}
        for key, field in fields.items():
            if key in value:
                found: list[Fault] = []
                arguments[key] = self.collect(found, key, value[key], field.type)
                if found:
                    del arguments[key]
                    faults.extend(found)
            elif field.default_choice is not None:
                arguments[key] = self.collect(faults, key, field.default_choice, field.type)
            elif field.required:
                faults.append(Fault((key,), "is required"))
        faulty = {fault.path[0] for fault in faults}
        faults.extend(_validation_faults(cls, fields, arguments, faulty))
        if not faults:
            try:
                return cls(**arguments)
            except (ValueError, TypeError, ArbError) as error:
                faults.append(_from_exception(error, fields))
        raise Faulty(faults)


def _could_be(value: Any, arm: Any) -> bool:
    """Whether a compound value has the shape of ``arm``, so that the faults inside it say more than "must be ..."."""
    if isinstance(value, Mapping):
        return attrs.has(arm) or is_mapping(arm)
    if isinstance(value, list | tuple):
        return is_sequence(arm)
    return isinstance(value, str) and is_choice(arm)


def _mismatch(value: Any, t: Any) -> Faulty:
    message = f"must be {describe_type(t)}, not {describe_value(value)}"
    if isinstance(value, str):
        arms = get_args(t) if is_union(t) else (t,)
        literals = [x for arm in arms if is_literal(arm) for x in get_args(arm) if isinstance(x, str)]
        close = nearest(value, literals)
        if close is not None:
            message += f"; did you mean '{close}'?"
    return Faulty.here(message)


def _unknown_key(key: Any, fields: Mapping[str, ConfigField]) -> str:
    close = nearest(str(key), fields)
    if close is not None:
        return f"unknown key; did you mean '{close}'?"
    return (
        f"unknown key; the keys here are {', '.join(sorted(fields))}" if fields else "unknown key; there are none here"
    )


def _validation_faults(
    cls: type[Any], fields: Mapping[str, ConfigField], arguments: Mapping[str, Any], faulty: set[str | int]
) -> list[Fault]:
    """Run every validator by itself, on an instance that was never initialised: attrs would stop at the first."""
    shadow = object.__new__(cls)
    faults: list[Fault] = []
    usable: list[tuple[ConfigField, Any]] = []
    for key, field in fields.items():
        if key in faulty or (key not in arguments and field.required):
            continue
        try:
            value = field.convert(arguments[key] if key in arguments else field.default_for(shadow), shadow)
        except (ValueError, TypeError) as error:
            faults.append(Fault((key,), _clean(error, key)))
            continue
        object.__setattr__(shadow, field.attribute.name, value)
        usable.append((field, value))
    for field, value in usable:
        if field.attribute.validator is None:
            continue
        try:
            field.attribute.validator(shadow, field.attribute, value)
        except (ValueError, TypeError, ArbError) as error:
            faults.append(Fault((field.key,), _clean(error, field.key)))
        except AttributeError:
            # The validator compares with an option that is itself at fault and therefore not there.
            if not faulty and not faults:
                raise
    return faults


def _clean(error: Exception, key: str) -> str:
    """The message of a validator, without the name of the option, which the path says already."""
    message = error.what if isinstance(error, ArbError) else str(error.args[0] if error.args else error)
    return re.sub(rf"^(['\"]?){re.escape(key)}\1:? ", "", message)


def _from_exception(error: Exception, fields: Mapping[str, ConfigField]) -> Fault:
    """A failure of the class as a whole; it is located at the option that its message begins with."""
    message = error.what if isinstance(error, ArbError) else str(error.args[0] if error.args else error)
    match = re.match(r"(['\"]?)(\w+)\1(?=[: ])", message)
    if match is not None and match[2] in fields:
        return Fault((match[2],), _clean(error, match[2]))
    return Fault((), message)
