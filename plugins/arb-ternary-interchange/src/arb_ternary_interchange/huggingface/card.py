"""The ``README.md`` of an exported folder: what it is, and how transformers loads it."""

from __future__ import annotations

from typing import Final

_CARD: Final = """\
---
library_name: transformers
---
# {name}

A decoder of ARB Ternary as a `{class_name}`, in the layout `{layout}`.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```

{dtypes}
"""
_ANY_DTYPE: Final = "Any other `dtype` works too."
_ONE_DTYPE: Final = """\
Other dtypes fail in the first forward pass: transformers keeps the ternary linears in {dtype}, the
dtype of the file, and their activations in the one that was asked for. An export with
`-o dtype=float32` loads with any."""


def model_card(name: str, class_name: str, layout: str, dtype: str) -> str:
    """Return the text of the file.

    Args:
        name: name of the run.
        class_name: class of the model in transformers.
        layout: see ``HfExportConfig``; not ``auto``.
        dtype: dtype of the floats in the files.
    """
    is_bound = layout == "dense_w1a8" and dtype != "float32"
    dtypes = _ONE_DTYPE.format(dtype=dtype) if is_bound else _ANY_DTYPE
    return _CARD.format(name=name, class_name=class_name, layout=layout, dtypes=dtypes)
