"""State dicts of models: made and loaded one module at a time, and taken from another run.

``state_dict()`` of a model encodes all its ternary weights before the first can be written, which
is a second copy of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import to_plain
from arb_ternary.counters.hashing import MICRO
from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary.specs import ModelSpec
from arb_ternary.ternary.encoding import bytes_per_row
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import differences
from arb_ternary_train.loading import load_config
from arb_ternary_train.part_names import is_named, near

#: How many differences an error lists.
_LISTED: Final = 5
#: Up to how many differing modules an error says how to skip them.
_SKIPPED: Final = 3


# --- one module at a time


@frozen(eq=False)
class ModelState:
    """The state dict of ``model``, in the order of ``model.state_dict()``."""

    model: nn.Module

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a tensor of the dtype and shape of each entry; nothing is encoded."""
        for unit in state_units(self.model):
            yield from unit_outline(*unit).items()

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors of one module after another."""
        for unit in state_units(self.model):
            yield unit_state(*unit)


def load_parts(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str] = frozenset()
) -> None:
    """Load ``tensors`` into ``model``; each tensor is accessed once.

    Args:
        model: the model. Names, shapes and dtypes of ``tensors`` must be its own.
        tensors: the state dict.
        kept: names of tensors that stay as they are; they are not accessed in ``tensors``.
    """
    for module, prefix, whole in state_units(model):
        names = [*unit_outline(module, prefix, whole)]
        if names and kept.issuperset(names):
            continue

        part = {}
        own = {} if kept.isdisjoint(names) else unit_state(module, prefix, whole)
        for name in names:
            part[name] = own[name] if name in kept else tensors[name]

        if whole:
            local = {name.removeprefix(prefix): tensor for name, tensor in part.items()}
            module.load_state_dict(local)
            continue
        faults: list[str] = []
        module._load_from_state_dict(part, prefix, {}, True, [], [], faults)
        if faults:
            raise RuntimeError("\n".join(faults))


def names_left_out(model: nn.Module) -> frozenset[str]:
    """Return the names that a state dict of ``model`` lacks: accumulators that it has not."""
    names = set()
    for name, module in ternary_modules(model):
        if not module.accumulates:
            names.add(f"{name}.votes" if name else "votes")
    return frozenset(names)


def state_units(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield the modules in their order: module, prefix of its names, and whether it is whole.

    A whole module is saved together with its children, because it customises its state dict.
    """
    kind = type(module)
    saving = module._state_dict_pre_hooks or module._state_dict_hooks
    loading = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    whole = bool(saving or loading) or kind.state_dict is not nn.Module.state_dict
    whole = whole or kind.load_state_dict is not nn.Module.load_state_dict
    yield module, prefix, whole
    if whole:
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from state_units(child, f"{prefix}{name}.")


def unit_state(module: nn.Module, prefix: str, whole: bool) -> dict[str, Any]:
    """Return what a unit adds to the state dict."""
    if whole:
        return module.state_dict(prefix=prefix)
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, prefix, False)
    return found


def unit_outline(module: nn.Module, prefix: str, whole: bool) -> dict[str, Any]:
    """Return :func:`unit_state` with tensors on the device "meta" if encoding them takes time."""
    if whole or type(module)._save_to_state_dict is not TernaryModule._save_to_state_dict:
        return unit_state(module, prefix, whole)
    assert isinstance(module, TernaryModule)
    found: dict[str, Any] = {}
    nn.Module._save_to_state_dict(module, found, prefix, False)
    rows = module.shape.out_features
    columns = module.shape.in_features
    packed = torch.empty(rows, bytes_per_row(columns), dtype=torch.uint8, device="meta")
    votes = torch.empty(rows, columns, dtype=torch.int8, device="meta")
    found[prefix + "weight"] = packed
    if module.accumulates:
        found[prefix + "votes"] = packed if module.shape.vote_bits == 2 else votes
    return found


# --- checked against the model


def load_state(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    kept: frozenset[str] = frozenset(),
) -> None:
    """Load ``tensors`` into ``model`` after checking names, shapes and dtypes.

    Accumulators that ``model`` was made without are not read.

    Args:
        model: the model.
        tensors: the state dict.
        where: what the error names.
        kept: names of tensors that stay as they are in ``model``, and need not be in either.

    Raises:
        CheckpointError: they differ; the first few differences are listed.
    """
    kept |= names_left_out(model)
    faults = [*_differences(model, tensors, kept).values()]
    if faults:
        hint = faults[:_LISTED]
        if len(faults) > _LISTED:
            hint.append(f"... and {len(faults) - _LISTED} more")
        hint.append("The config's model section must be that of the run it comes from.")
        raise CheckpointError(
            f"{where}: its tensors are not those of the model: {len(faults)} differ",
            "\n".join(hint),
        )
    load_parts(model, tensors, kept)


def _differences(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str]
) -> dict[str, str]:
    """Return what differs between ``model`` and ``tensors``, by name, except those ``kept``."""
    wanted = {name: tensor for name, tensor in ModelState(model).outlines() if name not in kept}
    faults = {}
    for name in wanted:
        if name not in tensors:
            faults[name] = f"missing: {name}"
    for name in tensors:
        if name not in wanted and name not in kept:
            faults[name] = f"not in the model: {name}"
    outline = getattr(tensors, "outline", tensors.__getitem__)
    for name, tensor in wanted.items():
        fault = _mismatch(name, tensor, outline(name)) if name in tensors else None
        if fault is not None:
            faults[name] = fault
    return faults


def _mismatch(name: str, wanted: Tensor, found: Tensor) -> str | None:
    """Return how shape or dtype of a tensor differ from those of the model."""
    # The origin of the exponents is one number for the whole weight until exponents move apart.
    if name.endswith("exponent_origin"):
        return None
    if wanted.shape != found.shape:
        return f"{name}: shape {tuple(found.shape)}, the model's is {tuple(wanted.shape)}"
    both_float = wanted.is_floating_point() and found.is_floating_point()
    if wanted.dtype != found.dtype and not both_float:
        return f"{name}: {found.dtype}, the model's is {wanted.dtype}"
    return None


# --- from another run


def checkpoint_path(source: Path) -> Path:
    """Return ``source``, or the newest checkpoint if it is a run directory.

    Raises:
        CheckpointError: there is none.
    """
    directory = RunDirectory(source)
    if directory.exists():
        return CheckpointStore(directory.checkpoints).latest()
    return source


def run_of(source: Path) -> RunDirectory | None:
    """Return the run directory that ``source`` is, or that holds the checkpoint ``source``.

    None if there is no such run.
    """
    directory = RunDirectory(source)
    if directory.exists():
        return directory
    # Another file in a folder of a run, such as an exported model, is not the run.
    folder = source.resolve().parent
    holder = RunDirectory(folder.parent)
    if not holder.exists():
        return None
    is_checkpoint = folder == holder.checkpoints or os.path.lexists(source / "manifest.json")
    return holder if is_checkpoint else None


def load_weights(
    model: nn.Module,
    source: Path,
    *,
    seed: int,
    options: Choice[ModelSpec] | None = None,
    skip: Sequence[str] = (),
    where: str = "--init-skip",
) -> Path:
    """Give ``model`` the weights, votes and exponents of a run directory or checkpoint.

    Votes continue with the randomness of ``seed``, not with that of the other run.

    Args:
        model: the model whose weights are replaced.
        source: the run directory or checkpoint.
        seed: seed of this run.
        options: options of the model, for an error that says which of the other run's differ.
        skip: patterns of names (:mod:`arb_ternary_train.part_names`) of tensors that ``model``
            keeps, whatever their shapes, or does not have.
        where: name of the option that ``skip`` was given by.

    Returns:
        The checkpoint that was loaded.

    Raises:
        CheckpointError: the checkpoint is damaged, or its other tensors are not exactly those of
            ``model``.
        ConfigError: a pattern names nothing on either side.
    """
    path = checkpoint_path(source)
    checkpoint = read_checkpoint(path)
    own_names = [name for name, _ in ModelState(model).outlines()]
    names = [*dict.fromkeys([*own_names, *checkpoint.model])]
    for pattern in skip:
        if not any(is_named(name, [pattern]) for name in names):
            raise ConfigError(
                f"{where}: {pattern!r} names nothing in the model or in {path}",
                near(pattern, names),
            )
    kept = frozenset(name for name in names if is_named(name, skip))
    try:
        load_state(model, checkpoint.model, str(path / "model.safetensors"), kept=kept)
    except CheckpointError as error:
        hint = [] if options is None else _other_options(source, options)
        hint += error.hint.splitlines()
        hint += _what_to_skip(model, checkpoint.model, kept, where)
        raise CheckpointError(error.what, "\n".join(hint)) from error
    seed_votes(model, seed)
    for _, module in ternary_modules(model):
        module.control[MICRO] = 0
    return path


def _what_to_skip(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str], where: str
) -> list[str]:
    """Return a sentence on how to continue if only few modules differ, such as a head."""
    faults = _differences(model, tensors, kept)
    modules = [*dict.fromkeys(name.rpartition(".")[0] or name for name in faults)]
    if len(modules) > _SKIPPED or len(faults) >= len(tensors.keys() - kept):
        return []
    if where.startswith("--"):
        flags = " ".join(f"{where} {name}" for name in modules)
    else:
        flags = f"{where.rpartition('.')[2]}: [{', '.join(modules)}]"
    return [f"Everything else fits. To start {' and '.join(modules)} afresh, add: {flags}"]


def _other_options(source: Path, options: Choice[ModelSpec]) -> list[str]:
    """Return a line for each option of the other run's model that differs from ``options``."""
    directory = run_of(source)
    if directory is None:
        return []
    there = to_plain(load_config(directory.config_file).config.model, given=False)
    return differences({"model": there}, {"model": to_plain(options, given=False)})[:_LISTED]
