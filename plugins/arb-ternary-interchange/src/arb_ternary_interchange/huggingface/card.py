"""The ``README.md`` of an exported folder: what it is, and how transformers loads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_train.task_results import COLUMNS, TaskResult

_CARD: Final = """\
---
library_name: transformers
{index}---
# {name}

A decoder of ARB Ternary as a `{class_name}`, in the layout `{layout}`.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```

{dtypes}
{prefix}{results}"""
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
_RESULTS: Final = """
## Results

{table}

By lm-evaluation-harness {lm_eval}, `arb eval --tasks`.{asked}
"""
_HARNESS: Final = "https://github.com/EleutherAI/lm-evaluation-harness"


def model_card(
    name: str,
    class_name: str,
    layout: str,
    dtype: str,
    special: SpecialTokens | None,
    results: Sequence[TaskResult] = (),
) -> str:
    """Return the text of the file.

    Args:
        name: name of the run.
        class_name: class of the model in transformers.
        layout: see ``HfExportConfig``; not ``auto``.
        dtype: dtype of the floats in the files.
        special: the special tokens of the tokenizer; None without a tokenizer.
        results: results of tasks, of this model.
    """
    is_bound = layout == "dense_w1a8" and dtype != "float32"
    dtypes = _ONE_DTYPE.format(dtype=dtype) if is_bound else _ANY_DTYPE
    has_prefix = special is None or special.bos is not None or bool(special.eos)
    prefix = "" if has_prefix else _NO_PREFIX
    return _CARD.format(
        index=_model_index(name, results),
        name=name,
        class_name=class_name,
        layout=layout,
        dtypes=dtypes,
        prefix=prefix,
        results=_section(results),
    )


def _model_index(name: str, results: Sequence[TaskResult]) -> str:
    """Return the results as the hub reads them."""
    listed = [entry for result in results for entry in _entries(result)]
    if not listed:
        return ""
    # JSON is YAML.
    return f"model-index: {json.dumps([{'name': name, 'results': listed}])}\n"


def _entries(result: TaskResult) -> Iterator[dict[str, Any]]:
    about = {
        "num_few_shot": result.num_fewshot,
        "samples": result.samples,
        "limit": result.limit,
        "chat_template": result.chat,
    }
    given = {key: value for key, value in about.items() if value is not None}
    for metric in result.metrics:
        if not math.isfinite(metric.value):
            continue
        found: dict[str, Any] = {
            "type": metric.name,
            "name": metric.title,
            "value": metric.value,
        }
        if metric.stderr is not None:
            found["args"] = {"stderr": metric.stderr}
        yield {
            "task": {"type": "text-generation", "name": result.task},
            "dataset": {"type": result.task, "name": result.task, "args": given},
            "metrics": [found],
            "source": {"name": f"lm-evaluation-harness {result.lm_eval}", "url": _HARNESS},
        }


def _section(results: Sequence[TaskResult]) -> str:
    """Return the results as a reader sees them."""
    if not results:
        return ""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row for each in results for row in each.rows())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    asked = ""
    if any(result.chat for result in results):
        tasks = ", ".join(result.task for result in results if result.chat)
        asked = f" Asked in conversations of the chat template: {tasks}."
    versions = ", ".join(dict.fromkeys(result.lm_eval for result in results))
    return _RESULTS.format(table=table, lm_eval=versions, asked=asked)
