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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from arb_ternary.config.options import scalar_text
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
    names = {field.alias for field in config_fields(cls)}
    for name in _RESERVED & names:
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
        except Exception as error:  # an error that is not a fault of the config is raised again
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
                hook = self.mapping_hook(t)
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

    def mapping_hook(self, t: Any) -> _Hook:
        """Return the hook for a mapping."""
        key, value = get_args(t) or (str, Any)
        if key is int:
            key = _WholeNumberKey
        as_dict: Any = dict[key, value]  # type: ignore[valid-type]
        hook: _Hook = mapping_structure_factory(as_dict, self.converter)
        return hook

    def list_hook(self, t: Any) -> _Hook:
        """Return the hook for a list, or for a tuple of a fixed or any length."""
        origin = get_origin(t) or t
        types = get_args(t) or (Any, ...)
        if origin is tuple and types[-1] is not Ellipsis:
            return self.fixed_tuple_hook(types)
        make: Any = list if origin is list else tuple
        as_list: Any = list[types[0]]  # type: ignore[valid-type]
        items = list_structure_factory(as_list, self.converter)
        return lambda value, _: make(items(value, t))

    def fixed_tuple_hook(self, types: Sequence[Any]) -> _Hook:
        """Return the hook for a tuple with an item of each type."""

        def fixed(value: Any, _: Any) -> Any:
            if len(value) != len(types):
                raise Faulty(Fault((), f"must have {len(types)} items, not {len(value)}"))
            results = []
            faults: list[Fault] = []
            for index, part in enumerate(types):
                result, found = self.attempt(value[index], part, (index,))
                results.append(result)
                faults += found
            if faults:
                raise Faulty(*faults)
            return tuple(results)

        return fixed

    def union(self, value: Any, t: Any) -> Any:
        """Structure a value into the first arm of a union that it fits."""
        compound = []
        # An arm of the type of the value first, so that 3 stays an int in `float | int`.
        arms = sorted(get_args(t), key=lambda arm: type(value) is not arm)
        for arm in arms:
            result, faults = self.attempt(value, arm)
            if not faults:
                return result
            # Faults inside a value of the shape of the arm say more than "must be ...".
            if isinstance(value, _WANTED.get(shape_of(arm), ())):
                compound.append(faults)
        if len(compound) == 1:
            raise Faulty(*compound[0])
        raise _mismatch(value, t)

    def class_hook(self, cls: type[Any]) -> _Hook:
        """Return the hook for a config class.

        It is generated by cattrs, with a check of each option by itself, so that every fault is
        reported.
        """
        options: Any = {}
        defaults: dict[str, Any] = {}
        for field in config_fields(cls):
            options[field.name] = override(struct_hook=partial(self.option, cls, field))
            if shape_of(field.type) == "choice" and not is_required(field):
                defaults[str(field.alias)] = default_of(field)
        generated = make_dict_structure_fn(
            cls,
            self.converter,
            _cattrs_forbid_extra_keys=True,
            _cattrs_use_alias=True,
            **options,
        )
        return lambda value, _: generated({**defaults, **value}, cls)

    def option(self, cls: type[Any], attribute: attrs.Attribute[Any], value: Any, t: Any) -> Any:
        """Structure an option by its type, then ask its validator.

        Both happen even if another option is at fault.
        """
        result = self.converter.structure(value, t)
        if attribute.validator is None:
            return result
        converted = result
        converter: Any = attribute.converter
        if converter is not None:
            converted = converter(result)
        # A validator that looks at other options fails here, because they do not exist yet. It is
        # asked again when the object is made.
        empty = object.__new__(cls)
        with suppress(AttributeError):
            attribute.validator(empty, attribute, converted)
        return result

    def choice(self, value: Any, cls: type[Choice[Any]]) -> Choice[Any]:
        """Structure a component, which is given by its name or by a mapping."""
        written: Mapping[str, Any] = value
        path: Path = ("name",)
        if isinstance(value, str):
            written = {"name": value}
            path = ()
        if "name" not in written:
            names = ", ".join(self.registry.names(cls.kind)) or "none"
            raise Faulty(Fault((), f"needs the 'name' of the {cls.noun}: {names}"))
        spec, config = self.component(written["name"], cls, path)

        options = {key: item for key, item in written.items() if key not in _RESERVED}
        structured = None
        if config is not None:
            structured = self.converter.structure(options, config)
        elif options:
            message = f"unknown key; {cls.noun} '{spec.name}' takes no options"
            unknown = [Fault((key,), message) for key in options]
            raise Faulty(*unknown)

        listed = written.get(GIVEN, list(options))
        given, faults = self.attempt(listed, tuple[str, ...], (GIVEN,))
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
        try:
            return float(value)
        except OverflowError as error:
            message = f"must be a number that float32 holds, not one of {len(str(value))} digits"
            raise Faulty(Fault((), message)) from error
    elif t is _WholeNumberKey and re.fullmatch(r"-?\d+", str(value)):
        return int(value)
    raise _mismatch(value, t)


def _mismatch(value: Any, t: Any) -> Faulty:
    """Return the fault of a value that does not have the type, with the nearest allowed word."""
    message = f"must be {describe_type(t)}, not {_describe_value(value)}"
    if isinstance(value, str):
        close = nearest(value, _allowed_words(t))
        if close is not None:
            message += f"; did you mean '{close}'?"
    return Faulty(Fault((), message))


def _allowed_words(t: Any) -> list[str]:
    """Return the texts that a literal, or the literals of a union, allow."""
    arms = get_args(t) if shape_of(t) == "union" else (t,)
    words: list[str] = []
    for arm in arms:
        if shape_of(arm) == "literal":
            words += [word for word in get_args(arm) if isinstance(word, str)]
    return words


def describe_type(t: Any) -> str:
    """Return a type in words that complete "must be ..."."""
    match shape_of(t):
        case "literal":
            words = [
                repr(each) if isinstance(each, str) else scalar_text(each) for each in get_args(t)
            ]
            return _either(words)
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
    return scalar_text(value)


def _either(words: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = words
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


def _faults(error: Exception, path: Path, keys: Collection[str] = ()) -> Iterator[Fault]:
    """Yield the faults in an exception that structuring raised at ``path``.

    An exception that is not a fault of the config is raised again. A fault of an instance as a
    whole is located at the one of its ``keys`` with which the message begins.
    """
    if isinstance(error, ClassValidationError):
        fields = config_fields(error.cl)
        aliases = {field.name: field.alias or "" for field in fields}
        noted, whole = error.group_exceptions()
        for inner in whole:
            yield from _faults(inner, path, aliases.values())
        for inner, note in noted:
            yield from _faults(inner, (*path, aliases[note.name]))
    elif isinstance(error, IterableValidationError):
        noted_items, _ = error.group_exceptions()
        for inner, item in noted_items:
            yield from _faults(inner, (*path, item.index))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields, key=str):
            yield Fault((*path, key), f"unknown key; {_advice(str(key), keys)}")
    elif isinstance(error, Faulty):
        for fault in error.faults:
            yield attrs.evolve(fault, path=(*path, *fault.path))
    elif isinstance(error, KeyError) and error.args == path[-1:]:
        yield Fault(path, "is required")
    elif isinstance(error, ComponentError):
        raise error
    elif isinstance(error, ArbError):
        yield _located(error.what, path, keys)
    elif isinstance(error, ValueError | TypeError):
        message = str(error.args[0]) if error.args else ""
        yield _located(message, path, keys)
    else:
        raise error


def _located(message: str, path: Path, keys: Collection[str]) -> Fault:
    """Return a fault at ``path``, or at the one of its ``keys`` with which the message begins."""
    name = re.match(r"(['\"]?)(\w+)\1(:? |:)", message)
    if name is None:
        return Fault(path, message)
    if name[2] in keys:
        path = (*path, name[2])
    if path[-1:] == (name[2],):
        message = message[name.end() :]  # the path says the name already
    return Fault(path, message)


def _advice(key: str, keys: Collection[str]) -> str:
    """Return advice on an unknown key: the key that is meant, or those that exist."""
    for ours, words in _ALSO_CALLED.items():
        if ours in keys and key.lower() in words.split():
            return f"did you mean '{ours}'?"
    close = nearest(key, keys)
    if close:
        return f"did you mean '{close}'?"
    if not keys:
        return "there are none here"
    return f"the keys here are {', '.join(sorted(keys))}"
