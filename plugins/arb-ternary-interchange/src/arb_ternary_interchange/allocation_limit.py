"""A limit to what a model may allocate while it is built from the description in an untrusted
file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary.errors import DataError

#: Largest number of trits in a byte of a file.
_DENSEST: Final = 5
#: Tensors of a weight's size that a module makes while it is built: trits, votes, packed forms.
_COPIES: Final = 4
#: What any description may ask for, in elements and in tensors.
_FREE_ELEMENTS: Final = 1 << 24
_FREE_TENSORS: Final = 20_000


class AllocationLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which no more is allocated than the weights in a file of ``nbytes`` bytes need.

    A description of a few bytes can ask for more memory than any machine has. What its importer
    overlooks ends here, as a DataError that begins with ``source``.
    """

    def __init__(self, source: str, nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source
        self._elements = _DENSEST * _COPIES * nbytes + _FREE_ELEMENTS
        self._tensors = nbytes + _FREE_TENSORS

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = func._schema.arguments
        if args and arguments and arguments[0].name == "size":
            self._tensors -= 1
            self._elements -= math.prod(args[0])
            if min(self._tensors, self._elements) < 0:
                raise DataError(
                    f"{self._source}: its description asks for a model larger than the file holds "
                    f"weights for",
                    "The file is damaged, or its description is false.",
                )
        return func(*args, **(kwargs or {}))
