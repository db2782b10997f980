"""AdaGC: Wang et al., "AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping",
2025.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from arb_ternary_orchestrator.optim.gradients import global_norm
from arb_ternary_orchestrator.optim.wrapper import FloatWrapper


class AdaGC(FloatWrapper):
    """Clips the gradient of each parameter to ``threshold`` times an average of its own clipped
    norms.

    During the first ``warmup`` gradients of a parameter, all gradients together are clipped to the
    norm ``max_norm``, and the smallest norm that the parameter then has starts its average.
    Afterwards, with the norm ``n`` and the average ``a``: ``n' = min(n, threshold a)``; ``a = decay
    a + (1 - decay) n'``.

    A gradient of exactly zero is ignored; a parameter that gets its first gradients late has its
    warm-up then. An update with a gradient that is not finite is dropped whole.

    Args:
        inner: the optimizer that steps.
        threshold: largest norm as a multiple of the average; 1.05 in the paper.
        decay: decay of the average.
        warmup: number of gradients of a parameter that are clipped globally.
        max_norm: norm that all gradients together are clipped to in the warm-up.

    Attributes:
        last_clipped: number of parameters whose gradient the last step clipped.
    """

    refuses: ClassVar[bool] = True

    def __init__(
        self,
        inner: Optimizer,
        *,
        threshold: float = 1.05,
        decay: float = 0.98,
        warmup: int = 100,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(inner)
        self.threshold = threshold
        self.decay = decay
        self.warmup = warmup
        self.max_norm = max_norm
        self.last_clipped = 0

    def _before(self, parameters: list[Tensor], norms: list[float]) -> None:
        total = global_norm(norms)
        self.last_clipped = 0
        for parameter, norm in zip(parameters, norms, strict=True):
            if norm == 0:
                continue
            state = self.state[parameter]
            seen = state.get("seen", 0)
            average = state.get("average")
            if seen < self.warmup or average is None:
                allowed = norm * min(1.0, self.max_norm / total)
                state["average"] = allowed if average is None else min(average, allowed)
            else:
                allowed = min(norm, self.threshold * average)
                state["average"] = self.decay * average + (1 - self.decay) * allowed
            state["seen"] = seen + 1
            if allowed < norm:
                assert parameter.grad is not None
                parameter.grad.mul_(allowed / norm)
                self.last_clipped += 1

    def _statistics(self) -> dict[str, float]:
        return {"clipped": float(self.last_clipped)}
