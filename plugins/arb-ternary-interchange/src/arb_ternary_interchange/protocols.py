"""What exporters and importers are: the interfaces that plugins of further formats implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Exporter(Protocol):
    """Writes a model in another form.

    One that writes no accumulators (votes) of ternary modules says so by an attribute
    ``writes_accumulators = False``: `arb export` then loads none, which saves a byte a weight.
    """

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file or folder ``destination``, atomically; an existing one is
        replaced only whole.
        """
        ...


@frozen(eq=False)
class ImportedModel:
    """A model as an importer has read it; its weights are still where they were.

    Attributes:
        model: the ``model:`` section of a run's config, with its ``name``.
        vocabulary_size: ids of the model's vocabulary.
        attachments: plain JSON by name, kept by the run as those of a data source are
            (``Attachments``): ``{"tokenizer": ...}``, or nothing.
        fill: gives the model that was built from ``model`` its weights, one tensor at a time: of
            all of them there is never a second copy in memory. Every weight must be given; those of
            ternary modules by ``set_trits``.
        notes: what could not be mapped or was rounded, a sentence each.
        data: the ``data:`` section of a config to fine-tune with; ``{run}`` in a text stands for
            the run's directory.
    """

    model: Mapping[str, Any]
    vocabulary_size: int
    attachments: Mapping[str, Any]
    fill: Callable[[nn.Module], None]
    notes: tuple[str, ...]
    data: Mapping[str, Any]


@runtime_checkable
class Importer(Protocol):
    """Reads a model that another program has written.

    Sources are files of strangers: nothing in them is executed, sizes are checked before memory is
    taken, and whatever is wrong with one is a ``DataError`` that names file and place.
    """

    def recognises(self, source: Path) -> bool:
        """Whether ``source``, a file or a folder, is of this importer's format, by its first bytes
        or its file names.

        Cheap, and False for what cannot be read.
        """
        ...

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """What is in ``source``, as plain JSON for ``arb inspect``, without reading weights.

        Keys, as far as they are known: ``format``, ``architecture``, ``vocabulary_size``,
        ``parameters``, ``bits_per_weight``, ``tokenizer``, ``scales``, ``tensors`` (``name``,
        ``shape``, ``type`` and ``bytes`` of each), ``unmapped`` (what an import would leave out, a
        sentence each), ``metadata`` (everything else).

        Raises:
            DataError: it is damaged, or not of this format.
        """
        ...

    def load(self, source: Path) -> ImportedModel:
        """The model in ``source``; weights are read by ``ImportedModel.fill``.

        Raises:
            DataError: it is damaged, or nothing that this program can hold.
        """
        ...


@runtime_checkable
class FetchesSources(Protocol):
    """An importer that also takes addresses, those of ``ImporterSpec.schemes``."""

    def fetch(self, source: str) -> Path:
        """Where ``source``, such as ``hf://org/name``, lies on this machine; it is brought here
        where it does not.

        Raises:
            DataError: there is nothing of this address, or no network.
        """
        ...
