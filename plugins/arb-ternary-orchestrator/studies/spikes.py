"""How often the spike detector calls noise a spike: the figures of
docs/explanation/orchestration.md.

``python plugins/arb-ternary-orchestrator/studies/spikes.py`` takes some minutes on one core.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arb_ternary_orchestrator.spikes import SpikeDetector

SEQUENCES = 4000
STEPS = 300
NOISE: dict[str, Any] = {
    "Gaussian": lambda generator, shape: generator.normal(size=shape),
    "Laplace": lambda generator, shape: generator.laplace(size=shape),
    "Student's t, 5 degrees": lambda generator, shape: generator.standard_t(5, size=shape),
    "Student's t, 3 degrees": lambda generator, shape: generator.standard_t(3, size=shape),
    "log-normal, sigma 0.5": lambda generator, shape: generator.lognormal(0, 0.5, size=shape),
    "exponential": lambda generator, shape: generator.exponential(size=shape),
}


def plain(values: Any, k: float, decay: float = 0.99) -> list[bool]:
    """The rule without any correction: statistics that start at the first value and at zero, spikes
    among them.
    """
    mean = float(values[0])
    variance = 0.0
    found = []
    for value in values:
        found.append(value > mean + k * math.sqrt(variance))
        distance = value - mean
        mean += (1 - decay) * distance
        variance = decay * variance + (1 - decay) * distance * distance
    return found


def corrected(values: Any, k: float) -> list[bool]:
    detector = SpikeDetector(k)
    return [detector.observe(float(value)) for value in values]


def main() -> None:
    for name, draw in NOISE.items():
        values = draw(np.random.default_rng(0), (SEQUENCES, STEPS))
        for k in (3.0, 4.0):
            found = np.array([corrected(row, k) for row in values])
            rates = found[:, 10:].mean(), found[:, 10:100].mean()
            many = (found[:, :100].sum(1) >= 3).mean()
            print(
                f"{name}, k = {k:g}: {rates[0]:.3%}, in the first 100 {rates[1]:.3%}; 3 or more "
                f"there: {many:.1%}"
            )
    found = np.array(
        [plain(row, 3.0) for row in np.random.default_rng(0).normal(size=(SEQUENCES, STEPS))]
    )
    print(
        f"Gaussian, no correction: 3 or more in the first 100: "
        f"{(found[:, :100].sum(1) >= 3).mean():.0%}"
    )
    for height in (4, 6, 10, 30, 100, 1000):
        lasts = []
        for seed in range(50):
            values = np.random.default_rng(seed).normal(size=900)
            values[300:] += height
            spikes = np.flatnonzero(corrected(values, 3.0))
            lasts.append(spikes[spikes >= 300].size)
        print(
            f"a level {height} deviations higher: {np.median(lasts):.0f} values are called spikes"
        )


if __name__ == "__main__":
    main()
