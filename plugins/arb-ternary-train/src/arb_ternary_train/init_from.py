"""Start from the weights of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import to_plain
from arb_ternary.counters.hashing import MICRO
from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary.specs import ModelSpec
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import differences
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import ModelState, load_parts, names_left_out
from arb_ternary_train.part_names import is_named, near

#: How many names an error lists.
_LISTED = 5
#: Of how many modules that alone differ an error says how to do without them.
_SKIPPED = 3


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
    """The run directory that ``source`` is, or that has the checkpoint ``source`` in it; None where
    there is none.
    """
    found = (RunDirectory(path) for path in (source, source.resolve().parent.parent))
    return next((directory for directory in found if directory.exists()), None)


def load_weights(
    model: nn.Module,
    source: Path,
    *,
    seed: int,
    options: Choice[ModelSpec] | None = None,
    skip: Sequence[str] = (),
    where: str = "--init-skip",
) -> Path:
    """Give ``model`` the weights, votes and exponents of a run directory or checkpoint; returns the
    checkpoint.

    Votes continue with the randomness of ``seed``, not with that of the other run.

    Args:
        model: whose weights are replaced.
        source: the run directory or checkpoint.
        seed: of this run.
        options: those of the model, for an error that says which of the other run's differ.
        skip: patterns of names (:mod:`arb_ternary_train.part_names`) of what ``model`` keeps,
            whatever its shapes, and of what it does not have.
        where: what ``skip`` is called where it was given.

    Raises:
        CheckpointError: the checkpoint is damaged, or its other tensors are not exactly those of
            ``model``.
        ConfigError: a pattern names nothing on either side.
    """
    path = checkpoint_path(source)
    checkpoint = read_checkpoint(path)
    names = dict.fromkeys([*(name for name, _ in ModelState(model).outlines()), *checkpoint.model])
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
        lines = [] if options is None else _other_options(source, options)
        hint = [
            *lines,
            *error.hint.splitlines(),
            *_what_to_skip(model, checkpoint.model, kept, where),
        ]
        raise CheckpointError(error.what, "\n".join(hint)) from error
    seed_votes(model, seed)
    for _, module in ternary_modules(model):
        module.control[MICRO] = 0
    return path


def _what_to_skip(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str], where: str
) -> Iterator[str]:
    """How to go on where only few modules differ, such as a head."""
    faults = _differences(model, tensors, kept)
    modules = [*dict.fromkeys(name.rpartition(".")[0] or name for name in faults)]
    if len(modules) <= _SKIPPED and len(faults) < len(tensors.keys() - kept):
        if where.startswith("--"):
            flags = " ".join(f"{where} {name}" for name in modules)
        else:
            flags = f"{where.rpartition('.')[2]}: [{', '.join(modules)}]"
        yield f"Everything else fits. To start {' and '.join(modules)} afresh, add: {flags}"


def _other_options(source: Path, options: Choice[ModelSpec]) -> list[str]:
    """A line for each option of the model of a run that differs from ``options``."""
    directory = run_of(source)
    if directory is None:
        return []
    there = to_plain(load_config(directory.config_file).config.model, given=False)
    return differences({"model": there}, {"model": to_plain(options, given=False)})[:_LISTED]


def load_state(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    kept: frozenset[str] = frozenset(),
) -> None:
    """``model.load_state_dict``, with names, shapes and kinds of number checked first; one tensor
    at a time.

    Those called ``kept`` stay as they are in ``model``, and need not be in either. Accumulators
    that ``model`` was made without are not read.

    Raises:
        CheckpointError: they differ; the first few differences are listed.
    """
    kept |= names_left_out(model)
    faults = [*_differences(model, tensors, kept).values()]
    if faults:
        more = [f"... and {len(faults) - _LISTED} more"] if len(faults) > _LISTED else []
        raise CheckpointError(
            f"{where}: its tensors are not those of the model: {len(faults)} differ",
            "\n".join(
                [
                    *faults[:_LISTED],
                    *more,
                    "The config's model section must be that of the run it comes from.",
                ]
            ),
        )
    load_parts(model, tensors, kept)


def _differences(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str]
) -> dict[str, str]:
    """What differs, by the names of tensors, but for those ``kept``."""
    wanted = {name: tensor for name, tensor in ModelState(model).outlines() if name not in kept}
    faults = {name: f"missing: {name}" for name in wanted if name not in tensors}
    faults |= {
        name: f"not in the model: {name}"
        for name in tensors
        if name not in wanted and name not in kept
    }
    outline = getattr(tensors, "outline", tensors.__getitem__)
    for name, tensor in wanted.items():
        if name in tensors:
            for text in _mismatch(name, tensor, outline(name)):
                faults[name] = text
    return faults


def _mismatch(name: str, wanted: Tensor, found: Tensor) -> list[str]:
    # The origin of the exponents is one number for the whole weight until exponents move apart.
    if name.endswith("exponent_origin"):
        return []
    if wanted.shape != found.shape:
        return [f"{name}: shape {tuple(found.shape)}, the model's is {tuple(wanted.shape)}"]
    if wanted.dtype != found.dtype and not (
        wanted.is_floating_point() and found.is_floating_point()
    ):
        return [f"{name}: {found.dtype}, the model's is {wanted.dtype}"]
    return []
