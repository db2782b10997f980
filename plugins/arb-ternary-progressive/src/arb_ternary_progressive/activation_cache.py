"""The hidden states that a frozen trunk gives its samples, computed once.

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

#: 1 GiB.
DEFAULT_BUDGET = 1 << 30


@frozen
class CacheStats:
    """What a cache has done.

    Attributes:
        hits: samples that were there.
        misses: samples that were not.
        evictions: samples dropped for want of room.
        samples: samples held now.
        nbytes: their bytes.
    """

    hits: int
    misses: int
    evictions: int
    samples: int
    nbytes: int


class ActivationCache:
    """Hidden states by sample and trunk, within a byte budget; what was used least recently goes
    first.

    A sample is known by its id and the version of the trunk (:func:`trunk_version`). Its inputs are
    compared as well, by digest: a sample that is masked otherwise than before is a miss, never
    another's hidden states.

    With the dtype ``float32`` the cache gives back what was put in, bit for bit. The other dtypes
    round; see ``HiddenCodec.rounded``, with which a run that recomputes sees the same numbers as
    one that looks them up.

    Args:
        byte_budget: most bytes: of the samples in memory, or of the file.
        folder: keeps the samples on disk, where a later process finds them; None = in memory.
        dtype: number format: ``float32``, ``bfloat16``, or ``int8`` with a scale a position.

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
        self._store: Store[Any] = (
            MemoryStore(byte_budget)
            if folder is None
            else DiskStore(Path(folder), byte_budget, dtype)
        )

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._store.nbytes

    @property
    def stats(self) -> CacheStats:
        """What it has done since it was made."""
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
        """The hidden states float32 ``[S, D]`` of a sample, or None. Counted as a hit or a miss.

        Args:
            sample_id: which sample.
            version: of the trunk.
            inputs: what the trunk reads: token ids ``[S]``, or an image.
            width: ``D``.
            positions: ``S``; None = as many as there are token ids.
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
        """:meth:`get` without counting."""
        positions = inputs.size(0) if positions is None else positions
        self._open(positions, width)
        found = self._store.get(CacheKey(int(sample_id), _short(version)), _digest(inputs))
        return None if found is None else self.codec.decode(found[None], positions, width)[0]

    def put(self, sample_id: int, version: str, inputs: Tensor, hidden_SD: Tensor) -> Tensor:
        """Keep the hidden states of a sample; returns them as they will be given back.

        Raises:
            UsageProblem: one sample exceeds the budget, or samples of another shape are on the
                disk.
        """
        positions, width = hidden_SD.shape
        self._open(positions, width)
        payload_1N = self.codec.encode(hidden_SD[None])
        self._store.put(CacheKey(int(sample_id), _short(version)), _digest(inputs), payload_1N[0])
        return self.codec.decode(payload_1N, positions, width)[0].to(hidden_SD.device)

    def drop(self, sample_id: int, version: str) -> None:
        """Forget a sample of a trunk."""
        self._store.drop(CacheKey(int(sample_id), _short(version)))

    def keep_only(self, versions: Iterable[str]) -> None:
        """Forget what belongs to other trunks than these."""
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
        """The hidden states float32 ``[B, S, D]`` of a batch, on the device of ``inputs``.

        Args:
            sample_ids_B: int64 ``[B]``.
            version: of the trunk.
            inputs: what the trunk reads: int64 ``[B, S]``, or images.
            width: ``D``.
            compute: called with the rows that are missing (int64 ``[M]``, at most once); returns
                ``[M, S, D]``.
            positions: ``S``; None = as many as a sample has token ids.
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
        """Let go of memory or file. What is on the disk stays there."""
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
    """A digest of everything that decides what frozen modules compute: structure, and every stored
    number.

    Args:
        modules: in the order in which they are applied.
        base: the version of what comes before them.

    Raises:
        UsageProblem: something in them can learn (a QLoRA trunk), so that hidden states of this
            step are not those of the next.
    """
    digest = hashlib.blake2b(base.encode(), digest_size=16)
    for module in modules:
        if (name := _learner(module)) is not None:
            raise UsageProblem(
                f"activation cache: {name} of the trunk can learn, so that its activations change "
                f"with every step",
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
    """The name of the first thing in ``module`` that can learn."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            return name
    for name, part in module.named_modules():
        learns: Any = not getattr(part, "frozen", True)
        if learns and (isinstance(part, TernaryModule) or hasattr(part, "stored_weights")):
            return name or type(part).__name__
    return None


def _short(version: str) -> str:
    """A version as 32 hexadecimal digits, whatever its text."""
    return hashlib.blake2b(version.encode(), digest_size=16).hexdigest()


def _digest(inputs_S: Tensor) -> bytes:
    content = inputs_S.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=16).digest()
