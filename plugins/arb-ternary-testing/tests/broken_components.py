"""Components with one fault each, under the suites that must find it.

test_kit_finds_faults.py runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from attrs import evolve

from arb_ternary.backends import reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import KernelBackend
from arb_ternary.optim.protocol import Trainable
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_testing import BackendSuite, MaskingSuite, OptimizerSuite, PhaseSuite
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_train.standard import StandardPhase
from arb_ternary_votes.sign_votes import SignVotes


def broken(**kernels: Any) -> KernelBackend:
    backend = reference.build()
    return evolve(backend, kernels={**backend.kernels, **kernels})


# --- backends


class TestVotesWithTheOtherSign(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return broken(cast_votes=lambda grad, *rest: reference_votes.cast_votes(-grad, *rest))


class TestVotesThatWrap(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def cast_votes(grad, x, scale, state):
            before = state.votes.clone()
            state.votes.zero_()
            reference_votes.cast_votes(grad, x, scale, state)
            state.votes.add_(before)

        return broken(cast_votes=cast_votes)


class TestSixteenBitSums(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def linear(x, scale, packed, exponent, bias, shape, dtype):
            if scale is None:
                return reference.linear(x, scale, packed, exponent, bias, shape, dtype)
            acc = (x.int() @ reference.unpack(packed, shape).int().t()).to(torch.int16)
            return acc * scale.unsqueeze(1) * torch.exp2(exponent[:, :1].float()).t()

        return broken(linear=linear)


class TestNegativeExponentsAsShifts(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def linear(x, scale, packed, exponent, *rest):
            return reference.linear(x, scale, packed, exponent.clamp(min=0), *rest)

        return broken(linear=linear)


def sums_of_shifted_weights(widest: int, dtype: torch.dtype) -> Any:
    """Return a product that clamps shifts to ``widest`` and adds up its terms in ``dtype``."""

    def linear(x, scale, packed, exponent, bias, shape, dtype_of_result):
        wide = exponent.long()
        floor = wide.amin(dim=1)
        shift = (wide - floor.unsqueeze(1)).clamp(max=widest)
        weight = reference.unpack(packed, shape) << reference.spread_over_columns(shift, shape)
        terms = x.unsqueeze(1).to(dtype) * weight.to(dtype)
        acc = terms.new_zeros(terms.shape[:2])
        for term in terms.unbind(dim=2):
            acc += term
        return acc.float() * scale.unsqueeze(1) * torch.exp2(floor.float())

    return linear


class TestShiftsOfThirtyTwoBits(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return broken(linear=sums_of_shifted_weights(31, torch.int64))


class TestSumsInFloat32(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return broken(linear=sums_of_shifted_weights(255, torch.float32))


class TestAnySpreadInSixtyFourBits(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return broken(linear=sums_of_shifted_weights(255, torch.int64))


class TestStaleWeights(BackendSuite):
    def make_backend(self) -> KernelBackend:
        kept: dict[int, Any] = {}

        def linear(x, scale, packed, *rest):
            if len(kept) > 50:
                kept.clear()
            _, stale = kept.setdefault(id(packed), (packed, packed.clone()))
            return reference.linear(x, scale, stale, *rest)

        return broken(linear=linear)


class TestSharedWorkspace(BackendSuite):
    def make_backend(self) -> KernelBackend:
        spaces: dict[Any, torch.Tensor] = {}

        def linear(*arguments):
            y = reference.linear(*arguments)
            return spaces.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)

        return broken(linear=linear)


class TestUnwrittenRows(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def linear_grad_input(*arguments):
            grad = reference.linear_grad_input(*arguments)
            out = torch.empty_like(grad)
            written = len(out) // 2 * 2
            out[:written] = grad[:written]
            return out

        return broken(linear_grad_input=linear_grad_input)


class TestPaddingThatFlips(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def apply_votes(state, threshold, leak):
            flips = reference_votes.apply_votes(state, threshold, leak)
            if state.shape.in_features % 128 and int(flips):
                state.weight[:, -1] |= 0b11000000
            return flips

        return broken(apply_votes=apply_votes)


class TestTwoStepsAtOnce(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def apply_votes(state, threshold, leak):
            old = reference.unpack(state.weight, state.shape)
            flips = reference_votes.apply_votes(state, threshold, leak)
            new = reference.unpack(state.weight, state.shape)
            state.weight.copy_(reference.pack((old + 2 * (new - old)).clamp(-1, 1)))
            return flips

        return broken(apply_votes=apply_votes)


class TestRoundingHalfUp(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def quantize_rows(x):
            _, scale = reference.quantize_rows(x)
            divisor = torch.where(scale == 0, torch.inf, scale).unsqueeze(1)
            quotient = (x.float() / divisor).nan_to_num(0, 0, 0)
            rounded = quotient.add(0.5).floor().clamp(-127, 127)
            return rounded.to(torch.int8), scale

        return broken(quantize_rows=quantize_rows)


class TestScaledVotesWithOneHash(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def cast_scaled_votes(*operands):
            *rest, state = operands
            control = state.control * torch.tensor([1, 1, 0, 1])
            reference_scaled_votes.cast_scaled_votes(*rest, state._replace(control=control))

        return broken(cast_scaled_votes=cast_scaled_votes)


class TestLookupsHashedByPosition(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def embedding_scaled_votes(ids, grad, scale, state):
            rows, position = torch.unique(ids, return_inverse=True)
            votes = state.votes.view(state.shape.out_features, -1)
            held = votes.index_select(0, rows)
            every = torch.cat(
                [rows, torch.arange(state.shape.out_features, state.vote_scale.numel())]
            )
            few = state._replace(
                weight=state.weight.index_select(0, rows),
                votes=held,
                exponent_votes=None,
                stats=torch.zeros(1 + every.numel()),
                magnitudes=torch.zeros(every.numel()),
                vote_scale=state.vote_scale.index_select(0, every),
                sizes=(len(rows), *state.sizes[1:]),
            )
            reference_scaled_votes.embedding_scaled_votes(position, grad, scale, few)
            votes.index_copy_(0, rows, held)

        return broken(embedding_scaled_votes=embedding_scaled_votes)


class TestRailThatCarries(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def apply_scaled_votes(state, threshold, decay, carry):
            trits = reference.unpack(state.weight, state.shape)
            before = state.votes.clone()
            flips = reference_scaled_votes.apply_scaled_votes(state, threshold, decay, carry)
            if carry and state.shape.vote_bits == 8:
                over = (before >= threshold) & (trits == 1)
                state.votes.copy_(torch.where(over, before - threshold, state.votes))
            return flips

        return broken(apply_scaled_votes=apply_scaled_votes)


class TestNarrowVotesThatWrap(BackendSuite):
    def make_backend(self) -> KernelBackend:
        def cast_votes(grad, x, scale, state):
            bits = state.shape.vote_bits
            held = reference.unpack_votes(state.votes, state.shape)
            reference_votes.cast_votes(
                grad, x, scale, state._replace(votes=held, sizes=(*state.sizes[:3], 8))
            )
            if bits == 4:
                held = ((held + 8) & 15) - 8
            if bits == 2:
                held = held.clamp(-1, 1)
            state.votes.copy_(reference.pack_votes(held, bits))

        return broken(cast_votes=cast_votes)


# --- masking


class Masking(CausalMasking):
    def corrupt(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> torch.Tensor:
        raise NotImplementedError

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        return evolve(
            super().apply(batch, generator, context), inputs=self.corrupt(batch, generator, context)
        )


class GlobalNoise(Masking):
    def corrupt(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> torch.Tensor:
        return torch.randint_like(batch.data[:, 1:], context.vocabulary_size)


class NoiseByRow(Masking):
    def corrupt(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> torch.Tensor:
        return torch.randint(
            0, context.vocabulary_size, batch.data[:, 1:].shape, generator=generator
        )


class InPlace(Masking):
    def corrupt(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> torch.Tensor:
        batch.data[:, 0] = 0
        return batch.data[:, :-1]


class ReservesBeyond(CausalMasking):
    def reserved_ids(self, vocabulary_size: int) -> tuple[int, ...]:
        return (vocabulary_size,)


class TestReservedBeyondTheVocabulary(MaskingSuite):
    def make_strategy(self) -> MaskingStrategy:
        return ReservesBeyond()


class TestGlobalNoise(MaskingSuite):
    def make_strategy(self) -> MaskingStrategy:
        return GlobalNoise()


class TestNoiseByRow(MaskingSuite):
    def make_strategy(self) -> MaskingStrategy:
        return NoiseByRow()


class TestMaskingInPlace(MaskingSuite):
    def make_strategy(self) -> MaskingStrategy:
        return InPlace()


# --- optimizers


class TestAscent(OptimizerSuite):
    parts = ("float",)

    def make_optimizer(self, trainable: Trainable) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": list(trainable.floats.values()), "kind": "float"}], lr=0.01, maximize=True
        )


class Forgetful(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class TestForgottenMomentum(OptimizerSuite):
    parts = ("float",)

    def make_optimizer(self, trainable: Trainable) -> torch.optim.Optimizer:
        return Forgetful(
            [{"params": list(trainable.floats.values()), "kind": "float"}], lr=0.01, momentum=0.9
        )


class Overcounting(SignVotes):
    def step(self, *arguments: Any, **options: Any) -> Any:
        outcome = super().step(*arguments, **options)
        return evolve(outcome, flips=outcome.flips + 1)


class TestOvercountedFlips(OptimizerSuite):
    parts = ("ternary",)

    def make_optimizer(self, trainable: Trainable) -> torch.optim.Optimizer:
        return Overcounting(trainable.ternary)


class TestHalfOfAllTritsFlip(OptimizerSuite):
    """Every vote is a flip. The loss of the regression falls all the same."""

    parts = ("ternary",)

    def make_optimizer(self, trainable: Trainable) -> torch.optim.Optimizer:
        return SignVotes(trainable.ternary, accum_threshold=1)


class TestStateThatIsNotPlain(OptimizerSuite):
    parts = ("float",)

    def make_optimizer(self, trainable: Trainable) -> torch.optim.Optimizer:
        groups = [{"params": list(trainable.floats.values()), "kind": "float", "note": object()}]
        return torch.optim.SGD(groups, lr=0.01)


# --- phases


class ForgetsItsPlace(StandardPhase):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = state["loop"]
        super().load_state_dict(
            {**state, "loop": {**loop, "sampler": {**loop["sampler"], "cursor": 0}}}
        )


class NeverStops(StandardPhase):
    def run(self, context: Any) -> Any:
        context.stop = SimpleNamespace(requested=False, reason="", set=lambda reason: None)
        return super().run(context)


class BrokenPhase(PhaseSuite):
    component = "standard"
    broken: ClassVar[type[StandardPhase]]

    def make_config(self, *arguments: Any, **options: Any) -> Any:
        config = super().make_config(*arguments, **options)
        (phase,) = config.phases
        made = evolve(phase, spec=evolve(phase.spec, target=f"{__name__}:{self.broken.__name__}"))
        return evolve(config, phases=(made,))


class TestForgottenCursor(BrokenPhase):
    broken = ForgetsItsPlace


class TestDeafPhase(BrokenPhase):
    broken = NeverStops
