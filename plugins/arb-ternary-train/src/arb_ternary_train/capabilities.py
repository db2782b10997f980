"""Optional attributes of components, each looked up by one function.

A component without the attribute is used without it. A config that asks for what its component
lacks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arb_ternary.config.choice import PhaseChoice

# --- models


def max_length(model: Any) -> int | None:
    """Return the longest sample that ``model`` takes, in positions: its ``max_length``.

    None if it does not say.
    """
    found: int | None = getattr(model, "max_length", None)
    return found


def takes_time(model: Any) -> bool:
    """Return whether ``model.forward(inputs, time=...)`` takes ``MaskedBatch.times`` now.

    A model says so by its attribute ``takes_time``.
    """
    return bool(getattr(model, "takes_time", False))


def checkpoints_activations(model: Any) -> bool:
    """Return whether ``model`` can recompute activations in the backward pass.

    Such a model has ``set_activation_checkpointing(enabled: bool, threshold: int | None)``, where
    ``threshold`` is the fewest predictions in a batch for which it is done (None = always).
    """
    return hasattr(model, "set_activation_checkpointing")


def carries_state(model: Any) -> bool:
    """Return whether ``model`` can keep state from one batch to the next, such as a cache.

    Such a model has ``set_state_preservation(enabled: bool)``, ``runtime_state()``, which returns
    the state in plain values and tensors (None = there is none), and
    ``load_runtime_state(state)``.
    """
    return hasattr(model, "set_state_preservation")


def chooses_dtypes(model: Any) -> bool:
    """Return whether ``model`` chooses what a number format applies to.

    Such a model has ``set_dtype(dtype: torch.dtype)``; in other models all float tensors are
    converted.
    """
    return hasattr(model, "set_dtype")


# --- data sources and masking strategies


def baselines(data: Any, block_size: int) -> Mapping[str, float]:
    """Return what simple predictors reach on the held-out samples of ``data``, by name.

    Losses are in nats per prediction, over all samples of an evaluation. A data source that knows
    them has ``baselines(block_size)``.
    """
    find = getattr(data, "baselines", None)
    return {} if find is None else find(block_size)


def held_out_predictions(data: Any, block_size: int) -> int | None:
    """Return the number of predictions in all held-out samples of ``data``; None if not known.

    A data source that knows it has ``held_out_predictions(block_size)``.
    """
    find = getattr(data, "held_out_predictions", None)
    return None if find is None else int(find(block_size))


def attachments(data: Any) -> Mapping[str, Any]:
    """Return what a trained model needs if the data is not at hand, such as names of its ids.

    It is plain JSON by name. The run keeps each as ``<name>.json``, and exporters are given all. A
    data source that has some has ``attachments()``.
    """
    find = getattr(data, "attachments", None)
    return {} if find is None else find()


def reserved_ids(masking: Any, vocabulary_size: int) -> Sequence[int]:
    """Return the ids that the data must not use, because ``masking`` replaces others by them.

    Such a masking strategy has ``reserved_ids(vocabulary_size)``. If only replaced ids are
    predicted, the class of its options has ``hides_tokens = True``, so that ``lr: auto``, which
    counts every token as a prediction, is refused.
    """
    find = getattr(masking, "reserved_ids", None)
    return () if find is None else find(vocabulary_size)


# --- phases and their options


def check_model(phase: Any, model: Any, where: str) -> None:
    """Check the options of ``phase`` against the model before the run is written.

    A phase that needs it has ``check_model(model, where)``.

    Args:
        phase: the phase.
        model: the model of the run.
        where: what the error names, such as ``phases[1]``.

    Raises:
        ConfigError: an option does not go with the model.
    """
    check = getattr(phase, "check_model", None)
    if check is not None:
        check(model, where)


def planned_steps(options: Any, run: Any) -> int:
    """Return the most optimizer steps that a phase of these ``options`` takes in ``run``.

    A phase that takes other than ``steps`` steps has ``planned_steps(run)`` in its options.
    """
    find = getattr(options, "planned_steps", None)
    return int(options.steps if find is None else find(run))


def has_own_loops(options: Any) -> bool:
    """Return whether a phase of these ``options`` runs several loops of other than ``steps`` steps.

    Its options then have ``steps_of_loop``: the most steps of one loop, None if that is only known
    when the phase runs.
    """
    return hasattr(options, "steps_of_loop")


def parts_added_by(phases: Sequence[PhaseChoice]) -> frozenset[str]:
    """Return the kinds of parts that ``phases``, the last of a run, add to its model to train.

    The options of a phase that adds parts have ``added_parts(followed=...)``, which returns the
    kinds that are trained, by the phase itself or, if it is ``followed``, by a later one.
    """
    kinds: frozenset[str] = frozenset()
    for index, phase in enumerate(phases):
        find = getattr(phase.options, "added_parts", None)
        if find is not None:
            kinds |= find(followed=index < len(phases) - 1)
    return kinds
