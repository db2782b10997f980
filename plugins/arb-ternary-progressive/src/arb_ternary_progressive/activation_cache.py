"""Cache the hidden states that a frozen trunk computes for its samples.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_progressive.cache_disk import DiskStore
from arb_ternary_progressive.cache_store import CacheKey, MemoryStore, Store
from arb_ternary_progressive.config import CacheDtype
from arb_ternary_progressive.hidden_codec import HiddenCodec

#: Default budget: 1 GiB.
DEFAULT_BUDGET = 1 << 30


@frozen
class CacheStats:
    """Counters of a cache.

    Attributes:
        hits: samples that were found.
        misses: samples that were not found.
        evictions: samples dropped to make room.
        samples: samples held now.
        nbytes: their bytes.
    """

    hits: int
    misses: int
    evictions: int
    samples: int
    nbytes: int


class ActivationCache:
    """Hidden states by sample and trunk, within a byte budget; the least recently used go first.

    A sample is identified by its id and the version of the trunk (:func:`trunk_version`). A digest
    of its inputs is compared as well: a sample that is masked in another way than before is a miss.

    With the dtype ``float32`` the cache returns exactly what was put in. The other dtypes round.
    ``HiddenCodec.rounded`` rounds in the same way, so a run that recomputes sees the same numbers
    as one that looks them up.

    Args:
        byte_budget: most bytes: of the samples in memory, or of the file.
        folder: folder of a cache on disk, which a later process can use; None = in memory.
        dtype: number format: ``float32``, ``bfloat16``, or ``int8`` with a scale per position.

    Raises:
        UsageProblem: the budget is not positive, the dtype is unknown, or another process uses the
            folder.
    """

    def __init__(
        self,
        byte_budget: int = DEFAULT_BUDGET,
        folder: str | Path | None = None,
        dtype: CacheDtype = "float32",
    ) -> None:
        if byte_budget < 1:
            raise UsageProblem(
                f"activation cache: byte_budget must be at least 1, not {byte_budget}"
            )
        self.codec = HiddenCodec(dtype)
        self.byte_budget = byte_budget
        self.hits = 0
        self.misses = 0
        self._kept: set[str] | None = None
        self._store: Store[Any] = MemoryStore(byte_budget)
        if folder is not None:
            self._store = DiskStore(Path(folder), byte_budget, dtype)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._store.nbytes

    @property
    def stats(self) -> CacheStats:
        """Counters since the cache was made."""
        return CacheStats(self.hits, self.misses, self._store.evictions, len(self), self.nbytes)

    def get(
        self,
        sample_id: int,
        version: str,
        inputs: Tensor,
        width: int,
        *,
        positions: int | None = None,
    ) -> Tensor | None:
        """Return the hidden states of a sample, float32 ``[S, D]``, or None; count a hit or a miss.

        Args:
            sample_id: id of the sample.
            version: version of the trunk.
            inputs: inputs of the trunk: token ids ``[S]``, or an image.
            width: ``D``.
            positions: ``S``; None = the number of token ids.
        """
        found = self.peek(sample_id, version, inputs, width, positions=positions)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def peek(
        self,
        sample_id: int,
        version: str,
        inputs: Tensor,
        width: int,
        *,
        positions: int | None = None,
    ) -> Tensor | None:
        """Return the same as :meth:`get` without counting."""
        positions = inputs.size(0) if positions is None else positions
        self._open(positions, width)
        found = self._store.get(CacheKey(int(sample_id), _short(version)), _digest(inputs))
        return None if found is None else self.codec.decode(found[None], positions, width)[0]

    def put(self, sample_id: int, version: str, inputs: Tensor, hidden_SD: Tensor) -> Tensor:
        """Keep the hidden states of a sample; return them as :meth:`get` will.

        Raises:
            UsageProblem: one sample exceeds the budget, or the folder holds samples of another
                shape.
        """
        positions, width = hidden_SD.shape
        self._open(positions, width)
        payload_1N = self.codec.encode(hidden_SD[None])
        self._store.put(CacheKey(int(sample_id), _short(version)), _digest(inputs), payload_1N[0])
        return self.codec.decode(payload_1N, positions, width)[0].to(hidden_SD.device)

    def drop(self, sample_id: int, version: str) -> None:
        """Forget one sample."""
        self._store.drop(CacheKey(int(sample_id), _short(version)))

    def keep_only(self, versions: Iterable[str]) -> None:
        """Forget the samples of all trunks but these, now and when a file is opened."""
        self._kept = {_short(version) for version in versions}
        self._store.keep_only(self._kept)

    def fetch(
        self,
        sample_ids_B: Tensor,
        version: str,
        inputs: Tensor,
        width: int,
        compute: Callable[[Tensor], Tensor],
        *,
        positions: int | None = None,
    ) -> Tensor:
        """Return the hidden states of a batch, float32 ``[B, S, D]``, on the device of ``inputs``.

        Args:
            sample_ids_B: int64 ``[B]``.
            version: version of the trunk.
            inputs: inputs of the trunk: int64 ``[B, S]``, or images.
            width: ``D``.
            compute: called at most once, with the rows that are missing (int64 ``[M]``); returns
                ``[M, S, D]``.
            positions: ``S``; None = the number of token ids of a sample.
        """
        rows = [
            self.get(sample, version, given, width, positions=positions)
            for sample, given in zip(sample_ids_B.tolist(), inputs.cpu(), strict=True)
        ]
        missing = [row for row, found in enumerate(rows) if found is None]
        if missing:
            hidden_MSD = compute(torch.tensor(missing, dtype=torch.int64))
            for row, hidden_SD in zip(missing, hidden_MSD, strict=True):
                rows[row] = self.put(int(sample_ids_B[row]), version, inputs[row], hidden_SD)
        return torch.stack([found.to(inputs.device) for found in rows if found is not None])

    def close(self) -> None:
        """Free the memory, or close the file; samples on disk stay."""
        self._store.close()

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, positions: int, width: int) -> None:
        known = len(self._store)
        self._store.open((positions, width), self.codec.sample_bytes(positions, width))
        if self._kept is not None and len(self._store) != known:
            self._store.keep_only(self._kept)


def trunk_version(*modules: nn.Module, base: str = "") -> str:
    """Return a digest of everything that decides the output of frozen modules.

    It covers their structure and all stored numbers.

    Args:
        modules: modules in the order in which they are applied.
        base: version of what comes before them.

    Raises:
        UsageProblem: something in them can learn (a QLoRA trunk), so hidden states change with
            every step.
    """
    digest = hashlib.blake2b(base.encode(), digest_size=16)
    for module in modules:
        name = _learner(module)
        if name is not None:
            raise UsageProblem(
                f"activation cache: {name} of the trunk can learn, so its activations change with "
                f"every step",
                "A QLoRA trunk streams: every batch runs through it. Only a frozen trunk "
                "(trunk_strategy: frozen) can be cached.",
            )
        digest.update(repr(module).encode())
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
    return digest.hexdigest()


def _learner(module: nn.Module) -> str | None:
    """Return the name of the first parameter or module in ``module`` that can learn."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            return name
    for name, part in module.named_modules():
        learns: Any = not getattr(part, "frozen", True)
        if learns and (isinstance(part, TernaryModule) or hasattr(part, "stored_weights")):
            return name or type(part).__name__
    return None


def _short(version: str) -> str:
    """Return a digest of a version, 32 hexadecimal digits."""
    return hashlib.blake2b(version.encode(), digest_size=16).hexdigest()


def _digest(inputs_S: Tensor) -> bytes:
    content = inputs_S.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=16).digest()
