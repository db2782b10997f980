"""The masking strategy ``absorbing``: masked diffusion, which predicts randomly hidden tokens.

Noise hides tokens for good: by time ``t`` each token has been replaced by the mask with probability
``t``. The negative log-likelihood of ``S`` tokens ``x`` is then at most

    L(x) = integral over t in (0, 1] of 1/t E[ sum over the hidden positions of -log p(x_i | the
    tokens that are not hidden) ] dt

(Sahoo et al., *Simple and Effective Masked Diffusion Language Models*, 2024, equation 10 with a
linear schedule; Shi et al., 2024). The weight ``1/t``: between ``t`` and ``s < t`` a hidden token
is revealed with probability ``(t - s) / t``, so its cross entropy enters with ``dt / t``.

Only the number ``k`` of hidden positions depends on the time, and ``integral of 1/t C(S,k) t^k
(1-t)^(S-k) dt = 1/k``, the beta function. Hence

    L(x) = sum over k = 1 .. S of the mean, over sets of k positions, of the mean cross entropy of
    those positions

This is ``S`` times an expectation over a uniform ``k`` and a uniform set of ``k`` positions: the
loss of models that write in any order (Hoogeboom et al., 2022; Ou et al., *Your Absorbing Discrete
Diffusion Secretly Models the Conditional Distributions of Clean Data*, 2024, theorem 2). ``k =
ceil(S t)`` is uniform, and each hidden position then has the weight ``S/k``. If positions are
hidden independently, it has the weight ``1/t``. The second moment of the loss is bounded with the
former and grows like ``log 1/t`` towards 0 with the latter.

The best prediction depends only on the tokens that are not hidden, not on the time (Ou et al.,
theorem 1), so a model needs no time.

Shapes: ``B`` samples, ``S`` positions, ``V`` ids.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from arb_ternary.counters.hashing import counter_hash_rows, stream_id, uniform_
from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_diffusion.absorbing_config import AbsorbingConfig

#: Streams of the hash: the time of each sample, and the order in which its positions are hidden.
_TIMES: Final = stream_id("arb_ternary_diffusion.absorbing.times")
_POSITIONS: Final = stream_id("arb_ternary_diffusion.absorbing.positions")


class AbsorbingMasking:
    """Hides tokens of each sample at its own time, with a loss that bounds the likelihood.

    Every token counts in the loss; those that are not hidden count with 0. The expected mean is an
    upper bound of the negative log-likelihood in nats per token, which can be compared with the
    loss of a model that writes from left to right. The bound is of each sample by itself.

    The times of a batch are evenly spaced, ``1 - (u + r/B) mod 1`` with one number ``u`` of the
    generator (Kingma et al., *Variational Diffusion Models*, 2021). ``r`` is the rank of the sample
    in an order that a hash of the ids and another number of the generator decides. So each time is
    uniform in (0, 1], the loss of a batch varies less than with independent times, and the order of
    the rows does not matter.
    """

    #: Unit of :meth:`losses`.
    loss_unit: Final = "nats per token, an upper bound"

    def __init__(self, config: AbsorbingConfig | None = None) -> None:
        self.config = AbsorbingConfig() if config is None else config

    def mask_token(self, vocabulary_size: int) -> int:
        """Return the id that stands for a hidden token.

        Raises:
            ConfigError: it is outside the vocabulary.
        """
        token = self.config.mask_token_id
        if token is None:
            return vocabulary_size - 1
        if token >= vocabulary_size:
            raise ConfigError(
                f"mask_token_id: {token} is outside the vocabulary of {vocabulary_size} ids",
                f"Use an id below {vocabulary_size} that is not in the data, or null for the last "
                f"one.",
            )
        return token

    def reserved_ids(self, vocabulary_size: int) -> tuple[int, ...]:
        """Return the ids that the data must not use."""
        return (self.mask_token(vocabulary_size),)

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return inputs with hidden tokens, the tokens, an all-true mask and times.

        The first three are ``[B, S]``, the times ``[B]``. With ``hiding: count`` the times are the
        shares of hidden positions.

        Raises:
            DataError: the mask token occurs in the data.
            ConfigError: it is outside the vocabulary.
        """
        tokens_BS = batch.data[:, :-1].clone(memory_format=torch.contiguous_format)
        mask_token = self.mask_token(context.vocabulary_size)
        _check_unused(tokens_BS, batch.sample_ids, mask_token)
        samples, positions = tokens_BS.shape
        salt = int(torch.randint(1 << 62, (), generator=generator))
        first = float(torch.rand((), generator=generator, dtype=torch.float64))
        ids_B = batch.sample_ids.to("cpu")
        rank_B = _ranks(counter_hash_rows(ids_B, 1, context.seed, salt, _TIMES).T).squeeze(0)
        time_B = 1.0 - (first + rank_B.double() / samples) % 1.0
        order_BS = counter_hash_rows(ids_B, positions, context.seed, salt, _POSITIONS)
        if self.config.hiding == "count":
            count_B = (positions * time_B).ceil().clamp(1, positions)
            hidden_BS = _ranks(order_BS) < count_B.unsqueeze(1)
            time_B = count_B / positions
        else:
            hidden_BS = uniform_(order_BS) < time_B.unsqueeze(1)
        device = tokens_BS.device
        inputs_BS = tokens_BS.masked_fill(hidden_BS.to(device), mask_token)
        counts_BS = torch.ones_like(hidden_BS, device=device)
        return MaskedBatch(inputs_BS, tokens_BS, counts_BS, time_B.float().to(device))

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        """Return what each token adds to the bound, float32 ``[B * S]``.

        This is its weighted cross entropy, and 0 if it is not hidden. The logit of the mask counts
        as minus infinity, because the mask is never the right token.

        Args:
            output: logits ``[B, S, V]``.
            batch: the result of :meth:`apply`.
        """
        logits_BSV = output.float()
        hidden_BS = batch.inputs != batch.targets
        mask_token = torch.where(hidden_BS, batch.inputs, -1).amax()
        is_mask_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device) == mask_token
        allowed_NV = logits_BSV.masked_fill(is_mask_V, -math.inf).flatten(0, 1)
        entropy_N = F.cross_entropy(allowed_NV, batch.targets.flatten(), reduction="none")
        assert batch.times is not None
        weighted_BS = entropy_N.view_as(hidden_BS) / batch.times.unsqueeze(1)
        return weighted_BS.masked_fill(~hidden_BS, 0.0).flatten()


def _ranks(keys_BS: Tensor) -> Tensor:
    """Return the rank of each element in its row, ascending; of equals the earlier comes first."""
    return keys_BS.argsort(dim=1, stable=True).argsort(dim=1)


def _check_unused(tokens_BS: Tensor, sample_ids_B: Tensor, mask_token: int) -> None:
    found_BS = tokens_BS == mask_token
    if bool(found_BS.any()):
        row, position = (int(i) for i in found_BS.nonzero()[0])
        raise DataError(
            f"sample {int(sample_ids_B[row])}: token id {mask_token} at position {position} is the "
            "mask token, and the data uses it",
            "Add an id to the data with data: {name: with_mask_token, source: ...} of "
            "arb-ternary-progressive, or set mask_token_id of the masking to an id that the data "
            "does not use.",
        )


def build(config: AbsorbingConfig) -> AbsorbingMasking:
    """Build the strategy ``absorbing``."""
    return AbsorbingMasking(config)
