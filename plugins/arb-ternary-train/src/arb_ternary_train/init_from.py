"""Start from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import to_plain
from arb_ternary.counters.hashing import MICRO
from arb_ternary.errors import CheckpointError
from arb_ternary.specs import ModelSpec
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import differences
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import ModelState, load_parts

__all__ = ["checkpoint_path", "load_state", "load_weights", "run_of"]

#: How many names an error lists.
_LISTED = 5


def checkpoint_path(source: Path) -> Path:
    """The checkpoint that ``source`` means: itself, or the newest of the run directory that it is.

    Raises:
        CheckpointError: there is none.
    """
    directory = RunDirectory(source)
    if directory.exists():
        return CheckpointStore(directory.checkpoints).latest()
    return source


def run_of(source: Path) -> RunDirectory | None:
    """The run directory that ``source`` is, or that has the checkpoint ``source`` in it; None where there is none."""
    found = (RunDirectory(path) for path in (source, source.resolve().parent.parent))
    return next((directory for directory in found if directory.exists()), None)


def load_weights(model: nn.Module, source: Path, *, seed: int, options: Choice[ModelSpec] | None = None) -> Path:
    """Give ``model`` the weights, votes and exponents of a run directory or checkpoint; returns the checkpoint.

    Votes continue with the randomness of ``seed``, not with that of the other run. ``options`` are those of the model,
    for an error that says which of the other run's differ.

    Raises:
        CheckpointError: the checkpoint is damaged, or its tensors are not exactly those of ``model``.
    """
    path = checkpoint_path(source)
    checkpoint = read_checkpoint(path)
    try:
        load_state(model, checkpoint.model, str(path / "model.safetensors"))
    except CheckpointError as error:
        if options is not None and (lines := _other_options(source, options)):
            raise CheckpointError(error.what, "\n".join([*lines, *error.hint.splitlines()])) from error
        raise
    seed_votes(model, seed)
    for _, module in ternary_modules(model):
        module.control[MICRO] = 0
    return path


def _other_options(source: Path, options: Choice[ModelSpec]) -> list[str]:
    """A line for each option of the model of a run that differs from ``options``."""
    directory = run_of(source)
    if directory is None:
        return []
    there = to_plain(load_config(directory.config_file).config.model, given=False)
    return differences({"model": there}, {"model": to_plain(options, given=False)})[:_LISTED]


def load_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """``model.load_state_dict``, with names, shapes and kinds of number checked first; one tensor at a time.

    Raises:
        CheckpointError: they differ; the first few differences are listed.
    """
    wanted = dict(ModelState(model).outlines())
    faults = [f"missing: {name}" for name in wanted if name not in tensors]
    faults += [f"not in the model: {name}" for name in tensors if name not in wanted]
    outline = getattr(tensors, "outline", tensors.__getitem__)
    for name, tensor in wanted.items():
        if name in tensors:
            faults += _mismatch(name, tensor, outline(name))
    if faults:
        more = [f"... and {len(faults) - _LISTED} more"] if len(faults) > _LISTED else []
        raise CheckpointError(
            f"{where}: its tensors are not those of the model: {len(faults)} differ",
            "\n".join([*faults[:_LISTED], *more, "The config's model section must be that of the run it comes from."]),
        )
    load_parts(model, tensors)


def _mismatch(name: str, wanted: Tensor, found: Tensor) -> list[str]:
    # The origin of the exponents is one number for the whole weight until exponents move apart.
    if name.endswith("exponent_origin"):
        return []
    if wanted.shape != found.shape:
        return [f"{name}: shape {tuple(found.shape)}, the model's is {tuple(wanted.shape)}"]
    if wanted.dtype != found.dtype and not (wanted.is_floating_point() and found.is_floating_point()):
        return [f"{name}: {found.dtype}, the model's is {wanted.dtype}"]
    return []
