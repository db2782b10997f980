"""The ``README.md`` of an exported folder: what it is, and how transformers loads it."""

from __future__ import annotations

from typing import Final

from arb_ternary_text.data.special_tokens import SpecialTokens

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
{prefix}"""
_ANY_DTYPE: Final = "Any other `dtype` works too."
_ONE_DTYPE: Final = """\
Other dtypes fail in the first forward pass: transformers keeps the ternary linears in {dtype}, the
dtype of the file, and their activations in the one that was asked for. An export with
`-o dtype=float32` loads with any."""
_NO_PREFIX: Final = """
The tokenizer has neither a token that begins a text nor one that ends it. lm-evaluation-harness has
to be told which token stands before a text, as in
`--model_args pretrained=folder,prefix_token_id=10`. Its tasks of the type `generate_until` need a
tokenizer with an end token.
"""


def model_card(
    name: str, class_name: str, layout: str, dtype: str, special: SpecialTokens | None
) -> str:
    """Return the text of the file.

    Args:
        name: name of the run.
        class_name: class of the model in transformers.
        layout: see ``HfExportConfig``; not ``auto``.
        dtype: dtype of the floats in the files.
        special: the special tokens of the tokenizer; None without a tokenizer.
    """
    is_bound = layout == "dense_w1a8" and dtype != "float32"
    dtypes = _ONE_DTYPE.format(dtype=dtype) if is_bound else _ANY_DTYPE
    has_prefix = special is None or special.bos is not None or bool(special.eos)
    prefix = "" if has_prefix else _NO_PREFIX
    return _CARD.format(
        name=name, class_name=class_name, layout=layout, dtypes=dtypes, prefix=prefix
    )
