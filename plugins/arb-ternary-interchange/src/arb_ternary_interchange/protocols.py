"""The interfaces of exporters and importers, which plugins for further formats implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Exporter(Protocol):
    """Writes a model in another form.

    An exporter that writes no accumulators (votes) of ternary modules has an attribute
    ``writes_accumulators = False``: `arb export` then loads none, which saves a byte per weight.
    """

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file or folder ``destination``, atomically: an existing one is
        replaced only by a complete one.
        """
        ...


@runtime_checkable
class LosesMetadata(Protocol):
    """An exporter that cannot hold all metadata of a run."""

    def unmapped(self, metadata: Mapping[str, Any]) -> Sequence[str]:
        """Return what the written form lacks of ``metadata``, one sentence each."""
        ...


@frozen(eq=False)
class ImportedModel:
    """A model as an importer has read it; its weights are still in the file.

    Attributes:
        model: the ``model:`` section of a run's config, with its ``name``.
        vocabulary_size: number of ids in the model's vocabulary.
        attachments: plain JSON by name, which the run keeps like those of a data source
            (``arb_ternary_train.capabilities.attachments``): ``{"tokenizer": ...}``, or nothing.
        fill: gives the model that was built from ``model`` its weights, one tensor at a time, so
            that there is never a second copy of all of them in memory. It must give every weight;
            those of ternary modules by ``set_trits``.
        notes: what could not be mapped or was rounded, one sentence each.
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

    The files may come from anybody: nothing in them is executed, sizes are checked before memory is
    allocated, and every fault is a ``DataError`` that names the file and the place.
    """

    def recognises(self, source: Path) -> bool:
        """Whether ``source``, a file or a folder, is of this importer's format, by its first bytes
        or its file names.

        This is cheap, and False for what cannot be read.
        """
        ...

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """Describe ``source`` as plain JSON for ``arb inspect``, without reading weights.

        Keys, as far as they are known: ``format``, ``architecture``, ``vocabulary_size``,
        ``parameters``, ``bits_per_weight``, ``tokenizer``, ``scales``, ``tensors`` (``name``,
        ``shape``, ``type`` and ``bytes`` of each), ``unmapped`` (what an import would leave out,
        one sentence each), ``metadata`` (everything else).

        Raises:
            DataError: it is damaged, or not of this format.
        """
        ...

    def load(self, source: Path) -> ImportedModel:
        """Read the model in ``source``, except for its weights: ``ImportedModel.fill`` reads them.

        Raises:
            DataError: it is damaged, or this program cannot hold such a model.
        """
        ...


@runtime_checkable
class FetchesSources(Protocol):
    """An importer that also takes addresses, with the schemes in ``ImporterSpec.schemes``."""

    def fetch(self, source: str) -> Path:
        """Return the place of ``source``, such as ``hf://org/name``, on this machine. It is
        downloaded if it is not there yet.

        Raises:
            DataError: there is nothing at this address, or no network.
        """
        ...
