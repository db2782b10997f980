"""Full-parameter training steps of a large pure-ternary decoder, and the memory that they take.

Blocks are copies of one block whose packed weights are then drawn again, one matrix at a time: at
no time is there a float or int8 tensor of more than one matrix.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.select import use_backend
from arb_ternary.errors import ArbError
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_bench.machine import bench_facts, load_average, with_threads
from arb_ternary_bench.memory import available_bytes, peak_bytes, resident_bytes
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.scaled_votes import ScaledVotes

#: Bytes per parameter of other ways of training: weights, gradients, moments, no activations.
OTHERS: Final[Mapping[str, float]] = {
    "float32 AdamW (4 + 4 + 8)": 16.0,
    "bfloat16 with 8-bit Adam (2 + 2 + 2)": 6.0,
}
#: Bytes beyond the model: Python, torch, activations of one block, the largest matrix while it is
#: drawn or decoded.
_ROOM: Final = 1 << 30

GroupSize = Literal[32, 64, 128, 256, "row"]


@frozen(kw_only=True)
class LargeModel:
    """Sizes of a decoder with SwiGLU.

    Attributes:
        vocabulary: token ids.
        tokens: tokens per step, one sequence.
    """

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tokens: int = 128

    def weights(self) -> int:
        """Return the number of trits in blocks, embedding and head."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.feed_forward
        return self.layers * block + 2 * self.vocabulary * self.width

    def config(self, group_size: GroupSize, gradients: Literal["float", "int8"]) -> DecoderConfig:
        """Return the decoder's options."""
        return DecoderConfig(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            feed_forward=self.feed_forward,
            activation="swiglu",
            max_length=self.tokens,
            group_size=group_size,
            gradients=gradients,
            logit_scale=-1,
        )


_ALL: Final = (
    # Llama 2 7B.
    LargeModel(
        name="7b",
        width=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        feed_forward=11008,
        vocabulary=32000,
    ),
    # TinyLlama 1.1B.
    LargeModel(
        name="1b",
        width=2048,
        layers=22,
        heads=32,
        kv_heads=4,
        feed_forward=5632,
        vocabulary=32000,
    ),
    # One that a test can wait for.
    LargeModel(
        name="tiny",
        width=64,
        layers=3,
        heads=2,
        kv_heads=2,
        feed_forward=128,
        vocabulary=256,
        tokens=32,
    ),
)
MODELS: Final[Mapping[str, LargeModel]] = {model.name: model for model in _ALL}


@frozen(kw_only=True)
class LargeRun:
    """What to do.

    Attributes:
        model: its sizes.
        backend: name.
        steps: optimizer steps; the first casts no votes, since scales are those of the step before.
        group_size: weights that share an exponent.
        gradients: ``float`` or ``int8``.
        threads: None keeps torch's number.
        seed: seed of weights, tokens and votes.
    """

    model: LargeModel
    backend: str
    steps: int = 3
    group_size: GroupSize = 128
    gradients: Literal["float", "int8"] = "float"
    threads: int | None = None
    seed: int = 0


def build_model(run: LargeRun, say: Callable[[str], None] = lambda _: None) -> Decoder:
    """Build the decoder with random trits, block by block."""
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    config = run.model.config(run.group_size, run.gradients)
    with use_backend(run.backend):
        model = Decoder(evolve(config, layers=1), run.model.vocabulary)
    template = model.blocks[0]
    for number in range(1, config.layers):
        block = copy.deepcopy(template)
        for _, module in ternary_modules(block):
            draw_trits_(module, generator)
        model.blocks.append(block)
        say(f"block {number + 1} of {config.layers}, {resident_bytes() / 2**30:.2f} GiB")
    model.config = config
    seed_votes(model, run.seed)
    return model


def draw_trits_(module: TernaryModule, generator: torch.Generator) -> None:
    """Replace the packed weight by a uniformly random one; only this matrix is ever int8."""
    size = (module.shape.out_features, module.shape.in_features)
    trits = torch.empty(size, dtype=torch.int8).random_(-1, 2, generator=generator)
    module.weight.copy_(kernel(module.backend, "pack")(trits))


def run_large_model(
    run: LargeRun, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Build the model, take the steps, and return the figures.

    Raises:
        ArbError: there is not enough memory, or a step changed nothing.
    """
    _check_memory(run)
    with with_threads(run.threads):
        facts = bench_facts((run.backend,))
        start = time.perf_counter()
        model = build_model(run, say)
        built = time.perf_counter() - start
        model.train()
        model.set_activation_checkpointing(True)
        # A rate at which the second set of votes can fill a cell: the few steps should flip
        # weights.
        optimizer = ScaledVotes(dict(ternary_modules(model)), lr=0.2)
        counted = audit(model, optimizer)
        built_peak = peak_bytes()
        say(
            f"{counted.parameters:,} parameters in {built:.0f} s; {resident_bytes() / 2**30:.2f} "
            f"GiB"
        )
        steps = [_step(model, optimizer, tokens, say) for tokens in _batches(run)]
    peak = peak_bytes()  # of the training: the check makes copies
    _check_votes(model, run)
    later = [step["seconds"] for step in steps[1:]] or [steps[0]["seconds"]]
    return {
        "machine": {**facts, "load_average_at_end": load_average()},
        "model": run.model.name,
        "layers": run.model.layers,
        "backend": run.backend,
        "gradients": run.gradients,
        "group_size": run.group_size,
        "tokens_per_step": run.model.tokens,
        "parameters": counted.parameters,
        "float_parameters": counted.float_parameters,
        "pure": counted.pure,
        "state_bytes": counted.state_bytes,
        "bytes_per_parameter": counted.state_bytes / counted.parameters,
        "seconds_to_build": built,
        "built_peak_bytes": built_peak,
        "peak_bytes": peak,
        "seconds_per_step": statistics.median(later),
        "steps": steps,
        "others": {name: round(each * counted.parameters) for name, each in OTHERS.items()},
    }


def _batches(run: LargeRun) -> list[Tensor]:
    """Return one random sequence per step, with the token after it."""
    generator = torch.Generator().manual_seed(run.seed + 1)
    size = (1, run.model.tokens + 1)
    return [
        torch.randint(0, run.model.vocabulary, size, generator=generator) for _ in range(run.steps)
    ]


def _step(
    model: Decoder, optimizer: ScaledVotes, tokens: Tensor, say: Callable[[str], None]
) -> dict[str, Any]:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.float32), tokens[:, 1:].flatten()
    )
    outcome = ternary_update(model, optimizer, loss)
    seconds = time.perf_counter() - start
    value = float(loss.detach())
    say(
        f"step: {seconds:.2f} s, loss {value:.3f}, {outcome.flips:,} flips, peak "
        f"{peak_bytes() / 2**30:.2f} GiB"
    )
    return {
        "seconds": seconds,
        "loss": value,
        "flips": outcome.flips,
        "exponent_moves": outcome.exponent_moves,
    }


def _check_votes(model: Decoder, run: LargeRun) -> None:
    """Check that both ends of the model have votes, which the first step does not cast yet.

    Raises:
        ArbError: one has none.
    """
    if run.steps == 1:
        return
    modules = ternary_modules(model)
    for name, module in (modules[0], modules[-1]):
        if not bool(module.logical_votes().any()):
            raise ArbError(f"{name}: {run.steps} steps cast no vote")


def _check_memory(run: LargeRun) -> None:
    """Refuse a model that would make the machine swap, or kill somebody else's process."""
    group = run.model.width if run.group_size == "row" else run.group_size
    needed = round(run.model.weights() * (1 + 1 / 4 + 2 / group)) + _ROOM
    free = available_bytes()
    if free is not None and needed > free:
        raise ArbError(
            f"{run.model.name} with {run.model.layers} layers takes about {needed / 2**30:.1f} "
            f"GiB; {free / 2**30:.1f} GiB are available",
            "Fewer layers take less: -o layers=4",
        )
