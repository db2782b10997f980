"""Hidden states of samples, kept so that frozen modules compute each of them once.

A hidden state is found by its sample and by the version of the modules that computed it: a digest
of all that decides their output (:func:`module_version`). It is in memory or in a file of its own,
which has a checksum. A file that a kill or the disk has damaged counts as absent, so nothing needs
to be flushed or repaired.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_train.directory import locked
from arb_ternary_train.safetensors_file import SafetensorsFile, tensor_bytes, write_safetensors

CacheDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]

_LOG = logging.getLogger(__name__)

#: Bytes that are left free on the disk.
_SPARE: Final = 1 << 28
#: Most bytes of the header of a file.
_HEADER_BYTES: Final = 256


# --- number formats


def encode(hidden: Tensor, dtype: CacheDtype) -> dict[str, Tensor]:
    """Return ``[..., S, D]`` in a number format, as tensors on the CPU.

    ``float32`` is exact. ``bfloat16`` rounds to nearest even. ``int8`` has ``s = max|x| / 127`` of
    each position in float32 and ``round_half_even(x / s)``; a position of zeros stays zero.
    """
    x = hidden.detach().to("cpu", torch.float32).contiguous()
    if dtype == "float32":
        return {"values": x}
    if dtype == "bfloat16":
        return {"values": x.to(torch.bfloat16)}
    scales = x.abs().amax(dim=-1, keepdim=True) / 127
    codes = torch.round(x / scales.clamp_min(torch.finfo(torch.float32).tiny))
    return {"values": codes.to(torch.int8), "scales": scales}


def decode(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 numbers that :func:`encode` stored."""
    values = stored["values"].to(torch.float32)
    return values * stored["scales"] if "scales" in stored else values


def rounded(hidden: Tensor, dtype: CacheDtype) -> Tensor:
    """Return what a cache of this format would, float32 on the device of ``hidden``."""
    if dtype == "float32":
        return hidden.detach().to(torch.float32)
    return decode(encode(hidden, dtype)).to(hidden.device)


# --- names of hidden states


def module_version(*modules: nn.Module, base: str = "") -> str:
    """Return a digest of all that decides the output of modules: structure and stored numbers.

    Args:
        modules: modules in the order in which they are applied.
        base: version of what comes before them.
    """
    digest = hashlib.blake2b(base.encode(), digest_size=16)
    for module in modules:
        digest.update(repr(module).encode())
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def sample_key(sample: int, inputs: Tensor, time: float | None = None) -> str:
    """Return the name of a sample in a cache.

    Args:
        sample: its id.
        inputs: its inputs, which masking may change from epoch to epoch.
        time: its time, if that is an input of the modules.
    """
    digest = hashlib.blake2b(tensor_bytes(inputs.detach().cpu().contiguous()), digest_size=16)
    if time is not None:
        digest.update(float(time).hex().encode())
    return f"{sample}-{digest.hexdigest()}"


def sample_keys(
    samples_B: Tensor, inputs: Tensor, times: Sequence[float] | None = None
) -> list[str]:
    """Return the names of the samples of a batch; see :func:`sample_key`."""
    samples = samples_B.tolist()
    moments = [None] * len(samples) if times is None else times
    rows = zip(samples, inputs.cpu(), moments, strict=True)
    return [sample_key(sample, given, time) for sample, given, time in rows]


# --- the cache


@frozen(eq=False)
class _Entry:
    """A hidden state: its bytes, and the tensors of :func:`encode`, or None if it is on disk."""

    nbytes: int
    tensors: Mapping[str, Tensor] | None


class ActivationCache:
    """Hidden states within a budget of bytes; the least recently used are dropped.

    With a folder, what exceeds the memory goes to the disk. If that is full, no more is kept.

    Args:
        memory: most bytes in memory.
        folder: folder of files, those of an earlier process included; None = memory only.
        disk: most bytes in the folder; None = as many as the disk has.
        dtype: number format. ``float32`` returns exactly what was put in.
        note: called with a message when the disk is full.

    Attributes:
        hits: samples that :meth:`fetch` found.
        misses: samples that it did not find.
        evictions: samples that were dropped to make room.

    Raises:
        UsageProblem: another process uses the folder.
    """

    def __init__(
        self,
        memory: int,
        folder: Path | None = None,
        disk: int | None = None,
        dtype: CacheDtype = "float32",
        note: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self.folder = folder
        self.dtype: CacheDtype = dtype
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._memory = memory
        self._disk = disk
        self._note = note
        self._disk_is_full = False
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._used = {"memory": 0, "disk": 0}
        self._lock = ExitStack()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        in_use = UsageProblem(
            f"activation cache: {folder} is in use by another process",
            "Give each run its own folder.",
        )
        self._lock.enter_context(locked(folder, in_use))
        stored = [(file.stat(), file) for file in folder.glob("*/*.safetensors")]
        for stat, file in sorted(stored, key=lambda each: (each[0].st_mtime_ns, each[1])):
            self._add(file.relative_to(folder), _Entry(stat.st_size, None))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held now, in memory and on disk."""
        return sum(self._used.values())

    def get(self, version: str, key: str) -> Tensor | None:
        """Return a hidden state, float32 ``[S, D]`` on the CPU, or None if it is not there.

        The caller must not change it.
        """
        name = self._name(version, key)
        entry = self._entries.get(name)
        if entry is None:
            return None
        tensors = self._read(name) if entry.tensors is None else entry.tensors
        if tensors is None:
            self._drop(name)
            return None
        self._entries.move_to_end(name)
        return decode(tensors)

    def put(self, version: str, key: str, hidden_SD: Tensor) -> Tensor:
        """Keep a hidden state if there is room; return it as :meth:`get` will.

        Raises:
            UsageProblem: the budget does not hold one sample.
        """
        tensors = encode(hidden_SD, self.dtype)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        name = self._name(version, key)
        self._drop(name)
        if self.folder is None or self._used["memory"] + nbytes <= self._memory:
            self._make_room("memory", nbytes, self._memory)
            # Copies, because a view would keep its whole batch in memory.
            copies = {part: tensor.clone() for part, tensor in tensors.items()}
            self._add(name, _Entry(nbytes, copies))
        elif not self._disk_is_full:
            nbytes += _HEADER_BYTES
            self._make_room("disk", nbytes, self._disk)
            self._write(self.folder / name, tensors, nbytes)
        return decode(tensors)

    def fetch(
        self,
        version: str,
        keys: Sequence[str],
        compute: Callable[[list[int]], Iterable[Tensor]],
    ) -> list[Tensor]:
        """Return the hidden states of a batch, and keep those that were not there.

        Args:
            version: version of the modules.
            keys: names of the samples.
            compute: called at most once, with the rows that are missing; returns their states.
        """
        rows = {row: self.get(version, key) for row, key in enumerate(keys)}
        missing = [row for row, found in rows.items() if found is None]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        if missing:
            for row, hidden_SD in zip(missing, compute(missing), strict=True):
                rows[row] = self.put(version, keys[row], hidden_SD)
        return [found for found in rows.values() if found is not None]

    def drop(self, version: str, key: str) -> None:
        """Forget one sample."""
        self._drop(self._name(version, key))

    def keep_only(self, versions: Iterable[str]) -> None:
        """Forget the samples of all modules but those of these versions."""
        kept = {self._folder_name(version) for version in versions}
        for name in [name for name in self._entries if name.parent.name not in kept]:
            self._drop(name)

    def close(self) -> None:
        """Free the memory and release the folder; samples on disk stay."""
        self._entries.clear()
        self._used = {"memory": 0, "disk": 0}
        self._lock.close()

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- entries

    def _folder_name(self, version: str) -> str:
        return hashlib.blake2b(f"{self.dtype} {version}".encode(), digest_size=16).hexdigest()

    def _name(self, version: str, key: str) -> Path:
        return Path(self._folder_name(version), f"{key}.safetensors")

    def _add(self, name: Path, entry: _Entry) -> None:
        self._entries[name] = entry
        self._used[_tier(entry)] += entry.nbytes

    def _drop(self, name: Path) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._used[_tier(entry)] -= entry.nbytes
        if entry.tensors is None and self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)

    def _make_room(self, tier: str, nbytes: int, budget: int | None) -> None:
        if budget is None:
            return
        if nbytes > budget:
            raise UsageProblem(
                f"activation cache: a budget of {budget:,} bytes does not hold one sample of "
                f"{nbytes:,}",
                "Raise the budget, use a smaller dtype, or train without the cache.",
            )
        while self._used[tier] + nbytes > budget:
            self._drop(next(name for name, each in self._entries.items() if _tier(each) == tier))
            self.evictions += 1

    # --- files

    def _write(self, file: Path, tensors: Mapping[str, Tensor], nbytes: int) -> None:
        assert self.folder is not None
        try:
            file.parent.mkdir(exist_ok=True)
            if shutil.disk_usage(file.parent).free < _SPARE + nbytes:
                raise OSError("less than 256 MiB would be left free")
            # Not synced to the disk, and not renamed: the checksum finds what is not whole.
            write_safetensors(file, tensors, _checksum(file, tensors))
        except OSError as error:
            file.unlink(missing_ok=True)
            self._disk_is_full = True
            self._note(
                f"{self.folder}: no further hidden states are cached, they are recomputed when "
                f"needed: {error}"
            )
            return
        self._add(file.relative_to(self.folder), _Entry(nbytes, None))

    def _read(self, name: Path) -> Mapping[str, Tensor] | None:
        assert self.folder is not None
        try:
            file = SafetensorsFile(self.folder / name)
            tensors = dict(file)
        except DataError:
            return None
        whole = file.metadata.get("arb_ternary") == _checksum(file.path, tensors)
        return tensors if whole else None


def _tier(entry: _Entry) -> str:
    return "disk" if entry.tensors is None else "memory"


def _checksum(file: Path, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(file.name.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(tensor_bytes(tensors[name]))
    return digest.hexdigest()
