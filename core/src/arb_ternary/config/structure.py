"""Structure plain values into config classes: strictly, and with all faults reported together.

cattrs walks the classes and gathers what fails. The hooks in this module make it strict, and the
notes that cattrs adds to exceptions give each fault its path.

An option can have these types: ``str``, ``int``, ``float``, ``bool``, ``pathlib.Path``, ``Any``,
``Literal``, unions of these, ``None``, ``list``, ``tuple``, ``Sequence``, ``dict`` and ``Mapping``
(with keys that are text or whole numbers), attrs classes, and the choices of ``config.choice``,
nested to any depth. Nothing is converted silently: text is not a number, and ``true`` is not 1.
The only exception is a whole number where a number is expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path as FilePath
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn, override

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Faulty, Path, raise_faults
from arb_ternary.config.fields import config_fields, default_of, is_required, shape_of
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import Spec, load_target

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]

#: Key of a component in a resolved config, next to its options: the options that the user wrote.
GIVEN = "given"
#: Keys of a component's mapping that are not options.
_RESERVED = frozenset({"name", GIVEN})
#: Names that other programs use for a key. If a name fits several keys, the first that exists in
#: that place is suggested.
_ALSO_CALLED = {
    "lr": "learning_rate learningrate alpha step_size eta",
    "weight_decay": "wd l2",
    "beta1": "betas momentum",
    "grad_clip": "clip max_grad_norm clip_grad_norm gradient_clip gradient_clip_val",
    "gradient_accumulation_steps": "accum accumulate grad_accum grad_accum_steps "
    "accumulation_steps",
    "batch_size": "bs batch batchsize micro_batch_size per_device_train_batch_size",
    "block_size": "seq seq_len seqlen seq_length sequence_length context context_length ctx "
    "max_length",
    "max_length": "seq seq_len seqlen seq_length sequence_length context context_length ctx "
    "block_size",
    "steps": "iters iterations max_iters max_steps num_steps train_steps",
    "width": "d_model dim hidden_size embed_dim n_embd",
}
#: The classes that plain values of a type have, by the shape of the type.
_WANTED: Mapping[str, Any] = {
    "class": Mapping,
    "choice": (str, Mapping),
    "list": (list, tuple),
    "mapping": Mapping,
}


class _WholeNumberKey(int):
    """A key that may be written as text, as in an override."""


#: Scalars in words that complete "must be ...".
_PLAIN: Mapping[Any, str] = {
    **dict.fromkeys((int, _WholeNumberKey), "a whole number"),
    bool: "true or false",
    float: "a number",
    str: "text",
    FilePath: "a path",
    NoneType: "null",
}


def structure(cls: type[T], document: Document, registry: Registry) -> T:
    """Structure a whole document into ``cls``.

    Raises:
        ConfigError, EnvironmentProblem: as :func:`raise_faults`.
    """
    result, faults = structure_with_faults(cls, document, registry)
    if faults or result is None:
        raise_faults(faults, document.origins, document.source)
    return result


def structure_with_faults(
    cls: type[T], document: Document, registry: Registry
) -> tuple[T | None, list[Fault]]:
    """Structure a whole document into ``cls``, and return its faults instead of raising them.

    The result is None if there is a fault.
    """
    result, faults = _structurer(registry).attempt(document.data, cls)
    return result, [*document.faults, *faults]


def options_class(spec: Spec) -> type[Any] | None:
    """Return the config class of a component; None if it has no options.

    Raises:
        EnvironmentProblem: the class cannot be imported.
        ComponentError: it is not an attrs class, or an option has a reserved name.
    """
    if spec.config is None:
        return None
    what = f"{spec.kind} '{spec.name}': the config class"
    cls = load_target(what, spec.config)
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise ComponentError(f"{what} {spec.config} is not an attrs class")
    for name in _RESERVED & {field.alias for field in config_fields(cls)}:
        reason = f"{what} {spec.config} has an option '{name}', which is reserved"
        raise ComponentError(reason, hint="Give the option another name.")
    return cls


@lru_cache(maxsize=1)  # cattrs compiles a function for each class that a config has met
def _structurer(registry: Registry) -> _Structurer:
    return _Structurer(registry)


class _Structurer:
    """The hooks for cattrs.

    Each takes a plain value and a type, and returns the structured value or raises
    :class:`Faulty`.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.converter = Converter(detailed_validation=True)
        # A hook for every type keeps out the lenient hooks of cattrs. Scalars need hooks of their
        # own, because cattrs looks these up by class first.
        self.converter.register_structure_hook_factory(lambda _: True, self.hook_for)
        for scalar in _PLAIN:
            self.converter.register_structure_hook(scalar, _scalar)

    def attempt(self, value: Any, t: Any, path: Path = ()) -> tuple[Any, list[Fault]]:
        """Return the structured value, or None and the faults; ``value`` is at ``path``."""
        try:
            return self.converter.structure(value, t), []
        except Exception as error:  # an error that is no fault of the config is raised again
            return None, list(_faults(error, path))

    def hook_for(self, t: Any) -> _Hook:
        """Return the hook for a type."""
        match shape_of(t):
            case "class":
                hook = self.class_hook(t)
            case "choice":
                hook = self.choice
            case "list":
                hook = self.list_hook(t)
            case "mapping":
                key, value = get_args(t) or (str, Any)
                as_dict: Any = dict[_WholeNumberKey if key is int else key, value]  # type: ignore[misc]
                hook = mapping_structure_factory(as_dict, self.converter)
            case "union":
                return self.union
            case "literal":
                return _scalar
            case _ if t is Any or t is object:
                return lambda value, _: value
            case _:
                raise ComponentError(f"a config class cannot have an option of type {t}")

        def checked(value: Any, _: Any) -> Any:
            if not isinstance(value, _WANTED[shape_of(t)]):
                raise _mismatch(value, t)
            return hook(value, t)

        return checked

    def list_hook(self, t: Any) -> _Hook:
        """Return the hook for a list, or for a tuple of a fixed or any length."""
        types = get_args(t) or (Any, ...)
        make: Any = list if t is list or get_origin(t) is list else tuple
        if make is list or types[-1] is Ellipsis or get_origin(t) is not tuple:
            items = list_structure_factory(list[types[0]], self.converter)  # type: ignore[valid-type]
            return lambda value, _: make(items(value, t))

        def fixed(value: Any, _: Any) -> Any:
            if len(value) != len(types):
                raise Faulty(Fault((), f"must have {len(types)} items, not {len(value)}"))
            parts = [self.attempt(value[index], part, (index,)) for index, part in enumerate(types)]
            if faults := [fault for _, found in parts for fault in found]:
                raise Faulty(*faults)
            return tuple(result for result, _ in parts)

        return fixed

    def union(self, value: Any, t: Any) -> Any:
        """Structure a value into the first arm of a union that it fits."""
        compound = []
        # An arm of the type of the value first, so that 3 stays an int in `float | int`.
        for arm in sorted(get_args(t), key=lambda arm: type(value) is not arm):
            result, faults = self.attempt(value, arm)
            if not faults:
                return result
            # Faults inside a value of the shape of the arm say more than "must be ...".
            if isinstance(value, _WANTED.get(shape_of(arm), ())):
                compound.append(faults)
        raise Faulty(*compound[0]) if len(compound) == 1 else _mismatch(value, t)

    def class_hook(self, cls: type[Any]) -> _Hook:
        """Return the hook for a config class.

        It is generated by cattrs, with a check of each option by itself, so that every fault is
        reported.
        """
        fields = config_fields(cls)
        options: Any = {
            field.name: override(struct_hook=partial(self.option, cls, field)) for field in fields
        }
        generated = make_dict_structure_fn(
            cls, self.converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True, **options
        )
        defaults = {
            str(field.alias): default_of(field)
            for field in fields
            if shape_of(field.type) == "choice" and not is_required(field)
        }
        return lambda value, _: generated({**defaults, **value}, cls)

    def option(self, cls: type[Any], attribute: attrs.Attribute[Any], value: Any, t: Any) -> Any:
        """Structure an option by its type, then ask its validator.

        Both happen even if another option is at fault.
        """
        result = self.converter.structure(value, t)
        if attribute.validator is not None:
            converter: Any = attribute.converter
            converted = result if converter is None else converter(result)
            # A validator that looks at other options fails here, because they do not exist yet. It
            # is asked again when the object is made.
            with suppress(AttributeError):
                attribute.validator(object.__new__(cls), attribute, converted)
        return result

    def choice(self, value: Any, cls: type[Choice[Any]]) -> Choice[Any]:
        """Structure a component, which is given by its name or by a mapping."""
        written: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
        if "name" not in written:
            names = ", ".join(self.registry.names(cls.kind)) or "none"
            raise Faulty(Fault((), f"needs the 'name' of the {cls.noun}: {names}"))
        spec, config = self.component(
            written["name"], cls, () if isinstance(value, str) else ("name",)
        )

        options = {key: item for key, item in written.items() if key not in _RESERVED}
        structured = None
        if config is not None:
            structured = self.converter.structure(options, config)
        elif options:
            message = f"unknown key; {cls.noun} '{spec.name}' takes no options"
            raise Faulty(*[Fault((key,), message) for key in options])

        given, faults = self.attempt(written.get(GIVEN, list(options)), tuple[str, ...], (GIVEN,))
        for index, key in enumerate(given or ()):
            if key not in options:
                faults.append(Fault((GIVEN, index), f"'{key}' is not among the options here"))
        if faults:
            raise Faulty(*faults)
        return cls(spec.name, structured, frozenset(given), spec)

    def component(
        self, name: Any, cls: type[Choice[Any]], path: Path
    ) -> tuple[Spec, type[Any] | None]:
        """Return the spec and the config class of the component that a choice names at ``path``."""
        if not isinstance(name, str):
            message = f"must be the name of the {cls.noun}, not {_describe_value(name)}"
            raise Faulty(Fault(path, message))
        try:
            spec: Spec = self.registry.get(cls.kind, name).spec
            return spec, options_class(spec)
        except UsageProblem as error:
            fault = Fault(path, error.what, error.hint, unknown_component=True)
            raise Faulty(fault) from error
        except EnvironmentProblem as error:
            raise Faulty(Fault(path, error.what, error.hint, environment=True)) from error


def _scalar(value: Any, t: Any) -> Any:
    """Structure a scalar: it has the type already, or a type that stands for it."""
    if type(value) is t:
        return value
    if shape_of(t) == "literal":
        for literal in get_args(t):
            if type(value) is type(literal) and value == literal:
                return literal
    elif t is FilePath and isinstance(value, str):
        return FilePath(value)
    elif t is float and type(value) is int:
        return float(value)
    elif t is _WholeNumberKey and re.fullmatch(r"-?\d+", str(value)):
        return int(value)
    raise _mismatch(value, t)


def _mismatch(value: Any, t: Any) -> Faulty:
    """Return the fault of a value that does not have the type, with the nearest allowed word."""
    message = f"must be {describe_type(t)}, not {_describe_value(value)}"
    if isinstance(value, str):
        arms = get_args(t) if shape_of(t) == "union" else (t,)
        allowed = [word for arm in arms if shape_of(arm) == "literal" for word in get_args(arm)]
        close = nearest(value, [word for word in allowed if isinstance(word, str)])
        if close is not None:
            message += f"; did you mean '{close}'?"
    return Faulty(Fault((), message))


def describe_type(t: Any) -> str:
    """Return a type in words that complete "must be ..."."""
    match shape_of(t):
        case "literal":
            return _either(
                repr(each) if isinstance(each, str) else _describe_plain(each)
                for each in get_args(t)
            )
        case "union":
            return _either(map(describe_type, get_args(t)))
        case "list":
            return "a list"
        case "choice":
            article = "an" if t.noun[0] in "aeiou" else "a"
            return f"the name of {article} {t.noun}, or a mapping with its name and options"
    return _PLAIN.get(t, "a mapping")


def _describe_value(value: Any) -> str:
    """Return a value in words that complete "not ..."."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f"{value!r} (text)"
    return _describe_plain(value)


def _describe_plain(value: Any) -> str:
    """Return a scalar as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _either(words: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _faults(error: Exception, path: Path, keys: Collection[str] = ()) -> Iterator[Fault]:
    """Yield the faults in an exception that structuring raised at ``path``.

    An exception that is no fault of the config is raised again. A fault of an instance as a whole
    is located at the one of its ``keys`` with which the message begins.
    """
    if isinstance(error, ClassValidationError):
        aliases = {field.name: field.alias or "" for field in config_fields(error.cl)}
        noted, whole = error.group_exceptions()
        for inner in whole:
            yield from _faults(inner, path, aliases.values())
        for inner, note in noted:
            yield from _faults(inner, (*path, aliases[note.name]))
    elif isinstance(error, IterableValidationError):
        for inner, place in error.group_exceptions()[0]:
            yield from _faults(inner, (*path, place.index))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields, key=str):
            yield Fault((*path, key), f"unknown key; {_advice(str(key), keys)}")
    elif isinstance(error, Faulty):
        yield from (attrs.evolve(fault, path=(*path, *fault.path)) for fault in error.faults)
    elif isinstance(error, KeyError) and error.args == path[-1:]:
        yield Fault(path, "is required")
    elif isinstance(error, ComponentError):
        raise error
    elif isinstance(error, ValueError | TypeError | ArbError):
        message = error.what if isinstance(error, ArbError) else str(*error.args[:1])
        name = re.match(r"(['\"]?)(\w+)\1(:? |:)", message)
        if name is not None and name[2] in keys:
            path = (*path, name[2])
        if name is not None and path[-1:] == (name[2],):
            message = message[name.end() :]  # the path says the name already
        yield Fault(path, message)
    else:
        raise error


def _advice(key: str, keys: Collection[str]) -> str:
    """Return advice on an unknown key: the key that is meant, or those that exist."""
    for ours, words in _ALSO_CALLED.items():
        if ours in keys and key.lower() in words.split():
            return f"did you mean '{ours}'?"
    if close := nearest(key, keys):
        return f"did you mean '{close}'?"
    return f"the keys here are {', '.join(sorted(keys))}" if keys else "there are none here"
