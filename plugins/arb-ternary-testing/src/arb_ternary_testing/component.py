"""The base of the suites of registered components: building one as a config would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import pytest
import torch

from arb_ternary.config.choice import choice_of
from arb_ternary.config.options import HELP
from arb_ternary.config.structure import options_class, structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ConfigError
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import resolve


def make_choice(kind: str, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the component ``name`` with ``options`` as a config file would hold them.

    Nested components are given by name.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed.
        UsageProblem, EnvironmentProblem: there is no such component.
    """
    return make_section(kind, {"name": name, **options})


def make_section(kind: str, section: Mapping[str, Any]) -> Any:
    """Return the component of a config file's section; see :func:`make_choice`."""
    registry = manager().registry
    name = section["name"]
    registry.get(kind, name)
    choice = choice_of(registry.kinds[kind])
    try:
        return structure(choice, Document(dict(section)), registry)
    except Exception as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error


class ComponentCase:
    """Base of the suites.

    Subclasses set ``component`` to the registered name and, if the defaults do not serve,
    ``options``.

    Attributes:
        kind: the kind of component; set by the suite.
        component: its registered name; empty if the suite's ``make_...`` method is overridden
            instead.
        options: options as in a config file.
    """

    kind: ClassVar[str] = ""
    component: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Use one thread: the suites' models are too small to gain from more."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def build(self, *arguments: Any) -> Any:
        """Return a new component, built as a run builds it."""
        if not self.component:
            raise NotImplementedError(
                f"{type(self).__name__}: set `component`, or override the method that builds it"
            )
        return make_choice(self.kind, self.component, self.options).build(*arguments)

    def test_options_have_help_texts(self) -> None:
        if not self.component:
            pytest.skip("not a registered component")
        spec = manager().registry.get(self.kind, self.component).spec
        assert callable(resolve(spec.target)), f"{spec.target} is not a factory"
        options = options_class(spec)
        if options is None:
            return
        settable = [field for field in attrs.fields(options) if field.init]
        mute = [field.name for field in settable if not field.metadata.get(HELP)]
        assert not mute, (
            f"options without a help text (declare them with config.options.option): {mute}"
        )
