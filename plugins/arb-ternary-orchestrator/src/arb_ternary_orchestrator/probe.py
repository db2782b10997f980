"""Loss on further training samples, without a trace: what candidates and restored states are judged
by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.protocols.data import BatchRequest
from arb_ternary.ternary.models import reset_runtime_state
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.precision import autocast_for
from arb_ternary_train.seeding import derive_seed, preserved_global_rng

if TYPE_CHECKING:
    from arb_ternary.protocols.data import Batch
    from arb_ternary_train.loop import TrainingLoop


def draw_probe(loop: TrainingLoop, batches: int) -> list[Batch]:
    """``batches`` batches of training samples, of an order that belongs to the loop's step and to
    nobody else.

    Held-out samples are not among them: what chooses how to train is a part of training.
    """
    options = loop.options
    context = loop.context
    seed = derive_seed(context.seed, loop.key, "probe", loop.step)
    source = context.data.batches(BatchRequest(options.batch_size, options.block_size, seed))
    try:
        return [next(source) for _ in range(batches)]
    finally:
        source.close()


@torch.no_grad()
def probe_loss(loop: TrainingLoop, batches: list[Batch]) -> float:
    """Mean of the loop's own loss over ``batches``: forward passes alone, no vote is cast and
    nothing learnt.

    What the model remembers of the last batch (``preserve_state``) is lost; restore a snapshot
    where it counts.
    """
    options = loop.options
    context = loop.context
    trainable = collect_trainable(loop.model)
    votes = bool(trainable.ternary or trainable.stored)
    autocast = autocast_for(context.device, options.use_amp, options.amp_dtype, ternary=votes)
    losses = []
    with preserved_global_rng(context.device), evaluation_mode(loop.model):
        for batch in batches:
            reset_runtime_state(loop.model)
            masked = loop.mask(batch).to(context.device)
            with autocast():
                output = loop.predict(batch, masked)
            losses.append(float(loop.loss(batch, masked, output)))
        reset_runtime_state(loop.model)
    return sum(losses) / len(losses)
