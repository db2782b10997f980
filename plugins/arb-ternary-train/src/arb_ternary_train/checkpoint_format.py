"""The files of a checkpoint: nested state as JSON and safetensors, with checksums of everything.

A state is a tree of dicts, lists, tuples, numbers, strings, booleans, None, bytes and tensors.
Tensors go to a safetensors file under their path in the tree; the rest goes to JSON. What JSON
cannot express is a tagged object ``{"$": kind, ...}``: tensors, tuples, non-finite floats, bytes,
counters, and dicts whose keys are not plain strings (the state dict of a torch optimizer has
integer keys). Floats survive exactly, because Python prints the shortest text that reads back to
the same number. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import CheckpointError, ComponentError, DataError
from arb_ternary_train.directory import reason_of
from arb_ternary_train.durable import flush
from arb_ternary_train.safetensors_file import SafetensorsFile, TensorParts, write_safetensors

FORMAT: Final = "arb-ternary-checkpoint"
VERSION: Final = 1
#: Version of a checkpoint whose model is in pieces, written by several ranks.
PIECES_VERSION: Final = 2

_TAG: Final = "$"


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that may be whole, but cannot be read here.

    It is of a newer version, or the system refuses to read it. Another checkpoint must not be taken
    instead of it.
    """


#: Types whose values JSON stores as they are.
_PLAIN: Final = frozenset({bool, int, str, type(None)})


def encode_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split ``state`` into a tree that JSON can hold and the tensors in it, by their path
    (``a/b/0``).

    Raises:
        ComponentError: a value has a type that cannot be stored; its path is named.
    """
    tensors: dict[str, Tensor] = {}

    def unused(path: str) -> str:
        name = path or "state"
        serial = 1
        while name in tensors:
            serial += 1
            name = f"{path}#{serial}"
        return name

    def encode(value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if isinstance(value, Tensor):
            name = unused(path)
            tensors[name] = value.detach()
            return {_TAG: "tensor", "name": name}
        if type(value) is bytes:
            return {_TAG: "bytes", "hex": value.hex()}
        if type(value) in (list, tuple, torch.Size):
            # Generators have hundreds of whole numbers, which need no path.
            if _PLAIN.issuperset(map(type, value)):
                items = list(value)
            else:
                items = [encode(item, _join(path, index)) for index, item in enumerate(value)]
            return items if type(value) is list else {_TAG: "tuple", "items": items}
        if isinstance(value, Mapping):
            is_counter = isinstance(value, Counter)
            has_plain_keys = all(type(key) is str for key in value) and _TAG not in value
            if has_plain_keys and not is_counter:
                return {key: encode(item, _join(path, key)) for key, item in value.items()}
            kind = "counter" if is_counter else "dict"
            pairs = [
                [encode(key, f"{path} (key)"), encode(item, _join(path, key))]
                for key, item in value.items()
            ]
            return {_TAG: kind, "items": pairs}
        raise ComponentError(
            f"{path or 'state'}: a {type(value).__module__}.{type(value).__qualname__} cannot go "
            f"into a checkpoint",
            "A state may hold tensors, numbers, strings, booleans, None, bytes, and dicts, lists "
            "and tuples of them.",
        )

    return encode(state, ""), tensors


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert :func:`encode_state`; a missing tensor raises KeyError with its name."""
    if isinstance(tree, list):
        return [decode_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_TAG)
    if kind is None:
        return {key: decode_state(item, tensors) for key, item in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind == "float":
        return float(tree["value"])
    if kind == "bytes":
        return bytes.fromhex(tree["hex"])
    items = tree["items"]
    if kind == "tuple":
        return tuple(decode_state(item, tensors) for item in items)
    if kind not in ("dict", "counter"):
        raise ValueError(f"unknown tag {kind!r}")
    pairs = {decode_state(key, tensors): decode_state(item, tensors) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs


def _join(path: str, key: Any) -> str:
    """Return the path of ``key`` below ``path``."""
    part = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{part}" if path else part


def tensor_digest(tensor: Tensor) -> str:
    """Return BLAKE2b-128 of the tensor's dtype, shape and bytes, in hexadecimal."""
    contiguous = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(
        f"{contiguous.dtype} {tuple(contiguous.shape)} ".encode(), digest_size=16
    )
    if contiguous.numel():
        digest.update(contiguous.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return SHA-256 of the file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor] | TensorParts, metadata: str
) -> dict[str, str]:
    """Write a safetensors file with ``metadata`` in its header; return the digest of each tensor.

    Every tensor is written whole, even if two share memory: a loader copies them back into whatever
    shares it then.
    """
    digests: dict[str, str] = {}
    write_safetensors(
        path, tensors, metadata, lambda name, tensor: digests.update({name: tensor_digest(tensor)})
    )
    return digests


@frozen
class WrittenTensors:
    """A file of tensors that is on the disk.

    Attributes:
        sha256: digest of the file.
        size: size of the file in bytes.
        tensors: digest of each tensor in it.
    """

    sha256: str
    size: int
    tensors: Mapping[str, str]


def write_flushed(
    path: Path, tensors: Mapping[str, Tensor] | TensorParts, metadata: str
) -> WrittenTensors:
    """Write tensors as :func:`write_tensors` does, and have the file survive a loss of power."""
    digests = write_tensors(path, tensors, metadata)
    flush(path)
    return WrittenTensors(file_digest(path), path.stat().st_size, digests)


class JoinedTensors(Mapping[str, Tensor]):
    """Tensors whose rows are in several files, one below the other."""

    def __init__(self, pieces: Sequence[VerifiedTensors]) -> None:
        self._pieces = pieces
        self._names = dict.fromkeys(name for piece in pieces for name in piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; CheckpointError if a part of it is not what was written."""
        found = [piece[name] for piece in self._pieces if name in piece]
        return torch.cat(found) if len(found) > 1 else found[0]

    def outline(self, name: str) -> Tensor:
        """Return a tensor without its numbers, on the device ``meta``."""
        found = [piece.outline(name) for piece in self._pieces if name in piece]
        return torch.cat(found) if len(found) > 1 else found[0]


class VerifiedTensors(Mapping[str, Tensor]):
    """The tensors of a file, each read and compared with its digest when it is accessed."""

    def __init__(self, file: SafetensorsFile, digests: Mapping[str, str]) -> None:
        self._file = file
        self._digests = digests

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; CheckpointError if it is not what was written."""
        digest = self._digests[name]
        try:
            tensor = self._file[name]
        except DataError as error:
            raise CheckpointError(error.what) from error
        if (found := tensor_digest(tensor)) != digest:
            raise CheckpointError(
                f"{self._file.path}: tensor {name!r} is damaged: checksum {found}, the manifest "
                f"says {digest}"
            )
        return tensor

    def outline(self, name: str) -> Tensor:
        """Return a tensor without its numbers, on the device ``meta``."""
        return self._file.outline(name)


def read_tensors(path: Path, sha256: str, digests: Mapping[str, str]) -> VerifiedTensors:
    """Return the tensors of a safetensors file that must have these digests.

    The whole file is verified, and nothing is kept in memory.

    Raises:
        CheckpointError: the file is missing, truncated or altered; the tensor is named if possible.
    """
    intact = verified_digest(path) == sha256
    try:
        file = SafetensorsFile(path)
    except DataError as error:
        raise CheckpointError(error.what) from error
    missing = [name for name in digests if name not in file]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]!r} is missing")
    tensors = VerifiedTensors(file, digests)
    if not intact:
        # Reading a damaged tensor raises an error that names it.
        for name in tensors:
            tensors[name]
    surplus = sorted(set(file) - set(digests))
    if surplus:
        raise CheckpointError(f"{path}: tensor {surplus[0]!r} is not in the manifest")
    if not intact:
        raise CheckpointError(
            f"{path}: the file's header is damaged: its checksum is not the one in the manifest"
        )
    return tensors


def unreadable(path: Path, error: OSError) -> UnreadableCheckpoint:
    """Return the error for a file that the system refuses to read."""
    return UnreadableCheckpoint(
        f"{path}: cannot be read: {reason_of(error)}",
        "The checkpoint may be whole. Make it readable, then repeat the command.",
    )


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as the manifest, with format, version and a checksum of itself."""
    version = PIECES_VERSION if "pieces" in content else VERSION
    body = {"format": FORMAT, "version": version, **content}
    signed = {**body, "checksum": _body_digest(body)}
    text = json.dumps(signed, indent=1, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        CheckpointError: it is missing, damaged, of another format or of a version that this program
            cannot read.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no such file", "A checkpoint is a folder with a manifest.json."
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the file is damaged: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise CheckpointError(
            f"{path}: the format is {found!r}, not {FORMAT!r}: this is not a checkpoint of arb"
        )
    if body.get("version") not in (VERSION, PIECES_VERSION):
        raise UnreadableCheckpoint(
            f"{path}: checkpoint format version {body.get('version')!r}; this program reads "
            f"versions {VERSION} and {PIECES_VERSION}",
            "Use the version of arb-ternary-core that wrote it; run.json in the run directory "
            "names it.",
        )
    checksum = body.pop("checksum", None)
    if checksum != _body_digest(body):
        raise CheckpointError(
            f"{path}: the file is damaged: its checksum does not match its content"
        )
    return body


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def verified_digest(path: Path) -> str:
    """Return SHA-256 of a file of a checkpoint; CheckpointError if it cannot be read."""
    try:
        return file_digest(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no such file; the checkpoint is incomplete"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
