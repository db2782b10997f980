"""Orthogonal matrices that spread large values in a few features over all features.

``Q = D (H x O)``: ``D`` are random signs, ``H`` is the Hadamard matrix of the largest power of two
that divides the size, over the root of its order, and ``O`` a random orthogonal matrix of the
remaining factor (1 for a power of two): 576 = 64 x 9. Randomised Hadamard matrices before rounding:
Tseng et al., QuIP#, 2024; as another basis of a whole transformer: Ashkboos et al., QuaRot, 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """Draw an orthogonal matrix, float64 ``[size, size]``."""
    order = size & -size
    rest = size // order
    # The Q of a Gaussian matrix is uniform once the signs of R's diagonal are taken out (Mezzadri,
    # 2007).
    q, r = torch.linalg.qr(torch.randn(rest, rest, generator=generator, dtype=torch.float64))
    q = (q * r.diagonal().sign()).contiguous()

    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < order:
        upper = torch.cat((hadamard, hadamard), 1)
        lower = torch.cat((hadamard, -hadamard), 1)
        hadamard = torch.cat((upper, lower))
    signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int64).double() * 2 - 1
    return signs[:, None] * torch.kron(hadamard / order**0.5, q)
