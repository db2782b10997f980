"""From plain values to config classes: strict, and with every fault at once.

cattrs walks the classes and gathers what fails; the hooks here make it strict, and its notes give each fault its path.

Types of options: ``str``, ``int``, ``float``, ``bool``, ``pathlib.Path``, ``Any``, ``Literal``, unions of these,
``None``, ``list``, ``tuple``, ``Sequence``, ``dict`` and ``Mapping`` (with text or whole-number keys), attrs classes,
and the choices of ``config.choice``, nested to any depth. Nothing is converted silently: text is not a number,
``true`` is not 1; only a whole number may stand where a number is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path as FilePath
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn, override

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
from arb_ternary.config.errors import Fault, Faulty, raise_faults
from arb_ternary.config.fields import ConfigField, config_fields
from arb_ternary.config.paths import Path
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import Spec, load_target

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

__all__ = ["GIVEN", "options_class", "structure", "structure_with_faults"]

T = TypeVar("T")

#: Key beside the options of a component in a resolved config: which of them the user wrote.
GIVEN = "given"
#: Keys of a component's mapping that are not options.
RESERVED = frozenset({"name", GIVEN})


class _WholeNumberKey(int):
    """A key that may be written as text: those of an override are."""


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
    result, faults = _Structurer(registry).attempt(document.data, cls)
    return result, [*document.faults, *faults]


def options_class(spec: Spec) -> type[Any] | None:
    """The config class of a component; None when it takes no options.

    Raises:
        EnvironmentProblem: its module cannot be imported.
        ComponentError: it does not exist, is not an attrs class, or has an option with a reserved name.
    """
    if spec.config is None:
        return None
    what = f"{spec.kind} '{spec.name}': the config class"
    cls = load_target(what, spec.config)
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise ComponentError(f"{what} {spec.config} is not an attrs class")
    for name in sorted(RESERVED & {field.key for field in config_fields(cls)}):
        reason = f"{what} {spec.config} has an option '{name}', which is reserved"
        raise ComponentError(reason, hint="Give the option another name.")
    return cls


class _Structurer:
    """The hooks. Each takes a plain value and a type, and returns the structured value or raises :class:`Faulty`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.converter = Converter(detailed_validation=True)
        # The hook that was registered last is asked first; the first one keeps cattrs' own, lenient ones out.
        self.converter.register_structure_hook_func(lambda _: True, _unsupported)
        for scalar in (bool, int, float, str, FilePath, NoneType, _WholeNumberKey):
            self.converter.register_structure_hook(scalar, _scalar)
        hooks: list[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]]] = [
            (lambda t: t is Any or t is object, lambda value, _: value),
            (is_literal, _scalar),
            (is_union, self.union),
            (is_sequence, self.sequence),
            (is_mapping, self.mapping),
        ]
        for applies, hook in hooks:
            self.converter.register_structure_hook_func(applies, hook)
        self.converter.register_structure_hook_factory(attrs.has, self.attrs_class)
        self.converter.register_structure_hook_func(is_choice, self.choice)

    def attempt(self, value: Any, t: Any, path: Path = ()) -> tuple[Any, list[Fault]]:
        """The structured value, or None and what is wrong, as seen from where ``value`` has the path ``path``."""
        try:
            return self.converter.structure(value, t), []
        except Exception as error:  # whatever is no fault of the config is raised again
            return None, list(_faults(error, path))

    def union(self, value: Any, t: Any) -> Any:
        compound = []
        # An arm of the value's own type first, so that 3 stays an int in `float | int`.
        for arm in sorted(get_args(t), key=lambda arm: type(value) is not arm):
            result, faults = self.attempt(value, arm)
            if not faults:
                return result
            if _could_be(value, arm):
                compound.append(faults)
        raise Faulty(*compound[0]) if len(compound) == 1 else _mismatch(value, t)

    def sequence(self, value: Any, t: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _mismatch(value, t)
        types = get_args(t) or (Any, ...)
        if origin_of(t) is not tuple or types[-1] is Ellipsis:
            items = list_structure_factory(list[types[0]], self.converter)(value, t)  # type: ignore[valid-type]
            return items if origin_of(t) is list else tuple(items)
        if len(value) != len(types):
            raise Faulty(Fault((), f"must have {len(types)} items, not {len(value)}"))
        parts = [
            self.attempt(item, part, (index,)) for index, (item, part) in enumerate(zip(value, types, strict=True))
        ]
        if faults := [fault for _, found in parts for fault in found]:
            raise Faulty(*faults)
        return tuple(result for result, _ in parts)

    def mapping(self, value: Any, t: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mismatch(value, t)
        key_type, value_type = get_args(t) or (str, Any)
        as_dict: Any = dict[_WholeNumberKey if key_type is int else key_type, value_type]  # type: ignore[misc]
        return mapping_structure_factory(as_dict, self.converter)(value, as_dict)

    def attrs_class(self, cls: type[Any]) -> Callable[[Any, Any], Any]:
        """The hook for ``cls``: cattrs' own, with each option checked by itself so that every fault is reported."""
        fields = config_fields(cls)
        checked: Any = {field.attribute.name: override(struct_hook=self.option(cls, field)) for field in fields}
        generated = make_dict_structure_fn(
            cls, self.converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True, **checked
        )
        chosen = {field.key: field.default for field in fields if is_choice(field.type) and not field.required}

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, Mapping):
                raise _mismatch(value, cls)
            return generated({**chosen, **value}, cls)

        return hook

    def option(self, cls: type[Any], field: ConfigField) -> Callable[[Any, Any], Any]:
        """The hook for an option: its type, then its validator. Both are asked even if another option is at fault."""
        validator, converter = field.attribute.validator, field.attribute.converter

        def hook(value: Any, t: Any) -> Any:
            result = self.converter.structure(value, t)
            if validator is not None and not isinstance(converter, attrs.Converter):
                converted = result if converter is None else converter(result)
                # A validator that looks at other options, which are not there yet, is asked when `cls` is made.
                with suppress(AttributeError):
                    validator(object.__new__(cls), field.attribute, converted)
            return result

        return hook

    def choice(self, value: Any, cls: type[Choice[Any]]) -> Choice[Any]:
        if not isinstance(value, str | Mapping):
            raise _mismatch(value, cls)
        where: Path = () if isinstance(value, str) else ("name",)
        given: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
        if "name" not in given:
            names = ", ".join(sorted(self.registry.names(cls.kind))) or "none"
            raise Faulty(Fault((), f"needs the 'name' of the {cls.noun}: {names}"))
        name = given["name"]
        if not isinstance(name, str):
            raise Faulty(Fault(where, f"must be the name of the {cls.noun}, not {describe_value(name)}"))
        try:
            spec = self.registry.get(cls.kind, name).spec
            config = options_class(spec)
        except UsageProblem as error:
            raise Faulty(Fault(where, error.what, error.hint, unknown_component=True)) from error
        except EnvironmentProblem as error:
            raise Faulty(Fault(where, error.what, error.hint, environment=True)) from error
        options = {key: item for key, item in given.items() if key not in RESERVED}
        if config is None and options:
            raise Faulty(*(Fault((key,), f"unknown key; {cls.noun} '{name}' takes no options") for key in options))
        structured = None if config is None else self.converter.structure(options, config)
        return cls(name, structured, self.given(given, options), spec)

    def given(self, value: Mapping[str, Any], options: Mapping[str, Any]) -> frozenset[str]:
        if GIVEN not in value:
            return frozenset(options)
        given, faults = self.attempt(value[GIVEN], tuple[str, ...], (GIVEN,))
        unknown = [(index, key) for index, key in enumerate(given or ()) if key not in options]
        faults += [Fault((GIVEN, index), f"'{key}' is not among the options here") for index, key in unknown]
        if faults:
            raise Faulty(*faults)
        return frozenset(given)


def _unsupported(_: Any, t: Any) -> Any:
    raise ComponentError(f"a config class cannot have an option of type {t}")


def _scalar(value: Any, t: Any) -> Any:
    if is_literal(t):
        for literal in get_args(t):
            if type(value) is type(literal) and value == literal:
                return literal
    elif type(value) is t:
        return value
    elif t is FilePath and isinstance(value, str):
        return FilePath(value)
    elif t is float and type(value) is int:
        return float(value)
    elif t is _WholeNumberKey and (type(value) is int or (isinstance(value, str) and re.fullmatch(r"-?\d+", value))):
        return int(value)
    raise _mismatch(value, int if t is _WholeNumberKey else t)


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
    return Faulty(Fault((), message))


# --- what cattrs gathered --------------------------------------------------------------------------------------------


def _faults(error: Exception, path: Path) -> Iterator[Fault]:
    """The faults in what structuring raised; an exception that is no fault of the config is raised again."""
    if isinstance(error, ClassValidationError):
        keys = {field.attribute.name: field.key for field in config_fields(error.cl)}
        noted, whole = error.group_exceptions()
        for inner in whole:
            yield from _class_faults(inner, path, keys.values())
        for inner, note in noted:
            yield from _faults(inner, (*path, keys[note.name]))
    elif isinstance(error, IterableValidationError):
        for inner, place in error.group_exceptions()[0]:
            yield from _faults(inner, (*path, place.index))
    elif isinstance(error, Faulty):
        yield from (fault.under(path) for fault in error.faults)
    elif isinstance(error, KeyError) and error.args == path[-1:]:
        yield Fault(path, "is required")
    elif isinstance(error, ValueError | TypeError | ArbError) and not isinstance(error, ComponentError):
        yield Fault(path, _message(error, path))
    else:
        raise error


def _class_faults(error: Exception, path: Path, keys: Collection[str]) -> Iterator[Fault]:
    """Unknown keys, or what an instance as a whole fails for: located at the option that its message begins with."""
    if isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields, key=str):
            close = nearest(str(key), keys)
            advice = f"the keys here are {', '.join(sorted(keys))}" if keys else "there are none here"
            yield Fault((*path, key), "unknown key; " + (f"did you mean '{close}'?" if close else advice))
        return
    match = re.match(r"(['\"]?)(\w+)\1(?=[: ])", _message(error, ()))
    yield from _faults(error, (*path, match[2]) if match is not None and match[2] in keys else path)


def _message(error: Exception, path: Path) -> str:
    """The message of a validator, without the name of the option, which the path says already."""
    message = error.what if isinstance(error, ArbError) else str(error.args[0] if error.args else error)
    key = path[-1] if path else ""
    return re.sub(rf"^(['\"]?){re.escape(key)}\1:? ", "", message) if key and isinstance(key, str) else message
