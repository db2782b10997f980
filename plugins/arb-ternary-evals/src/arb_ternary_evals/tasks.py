"""Evaluate a model on tasks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from arb_ternary.errors import ArbError, DataError, UsageProblem, nearest
from arb_ternary_chat.model import Model, load_model
from arb_ternary_text.data.tokenizers import Tokenizer

#: Names of errors that say that there is no network, or no such data set on the hub.
_NETWORK: Final = frozenset(
    {"ConnectError", "ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"}
)
#: Most tasks of a folder that an error lists.
_LISTED: Final = 8


def evaluate_tasks(
    source: str | Path | nn.Module,
    tasks: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    include: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool = True,
    system_instruction: str | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Evaluate a language model on tasks of lm-evaluation-harness.

    Args:
        source: a run directory, a checkpoint, a GGUF file, a Hugging Face folder, a safetensors
            file, ``hf://org/name``, or a language model in memory, in evaluation mode.
        tasks: names of tasks, groups or tags.
        tokenizer: of a model in memory; models from files have their own.
        include: folder with task files of your own; they may have a name that the harness knows.
        limit: number of samples of each task, from its beginning; None = all.
        num_fewshot: number of examples before each question; None: the number of each task. A task
            whose file says 0 keeps it.
        apply_chat_template: ask in conversations that the model's chat template writes.
        fewshot_as_multiturn: with a chat template: examples are turns of their own.
        system_instruction: stands before everything else, as a system message in conversations.
        backend: kernel backend; None: that of the environment, of the run, or the best one.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``mps``; None: the run's own, or the CPU.

    Returns:
        Plain values: how the model was asked, and ``tasks``, for each task ``samples``,
        ``num_fewshot``, and ``metrics`` by ``name,filter``, as the harness names them. A task that
        measures whole texts has ``nats_per_token`` and ``bits_per_byte,none`` among them.

    Raises:
        UsageProblem: there is no such model or task, or no chat template.
        DataError: a task cannot be read or computed.
    """
    manager = _task_manager(tasks, include)

    from lm_eval import evaluate

    from arb_ternary_evals.adapter import HarnessModel

    if isinstance(source, nn.Module):
        if tokenizer is None:
            raise UsageProblem("tokenizer: must be given with a model in memory, which has none")
        where = torch.device(device or "cpu")
        model = Model(source, tokenizer, {}, where, backend or "", type(source).__name__)
    else:
        model = load_model(source, backend=backend, device=device)
    if apply_chat_template and model.special.chat_template is None:
        raise UsageProblem(
            f"{model.source}: the tokenizer has no chat template, which writes conversations",
            "Leave out --apply-chat-template: such a model continues texts.",
        )
    asked = HarnessModel(model, chat=apply_chat_template)
    logger = logging.getLogger("lm_eval")
    level = logger.level
    # It warns of what task files may leave out.
    logger.setLevel(logging.ERROR)
    try:
        loaded = manager.load(list(tasks))
        kept = _set_examples(loaded["tasks"], num_fewshot)
        found = evaluate(
            lm=asked,
            task_dict=loaded,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            system_instruction=system_instruction,
            log_samples=False,
        )
    except ArbError:
        raise
    except Exception as error:  # whatever a task file makes the harness raise
        named = f"{type(error).__name__}: {error}"
        raise DataError(f"tasks: {', '.join(tasks)}: {named}", _hint_for(error)) from error
    finally:
        logger.setLevel(level)
    assert found is not None  # it is None on the other ranks of several

    results: dict[str, dict[str, Any]] = {}
    for name, values in found["results"].items():
        results[name] = {
            "samples": found["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": found["n-shot"].get(name),
            "metrics": _numbers(values),
        }
    for name, measured in asked.rolling.items():
        if name in results and measured.tokens:
            metrics = results[name]["metrics"]
            metrics["nats_per_token"] = measured.nats / measured.tokens
            bits = measured.nats / math.log(2) / measured.size
            metrics.setdefault("bits_per_byte,none", bits)
    return {
        "source": model.source,
        "step": model.step,
        "backend": model.backend,
        "lm_eval": version("lm-eval"),
        "limit": limit,
        "apply_chat_template": apply_chat_template,
        "fewshot_as_multiturn": apply_chat_template and fewshot_as_multiturn,
        "system_instruction": system_instruction,
        "notes": [*model.notes, *asked.notes, *kept],
        "tasks": results,
    }


def _set_examples(tasks: Mapping[str, Any], num_fewshot: int | None) -> list[str]:
    """Set how many examples each task gets, and all seeds; return a note per task that refuses.

    This is what the harness's ``simple_evaluate`` does. It also describes the machine, which takes
    seconds of each evaluation.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    notes = []
    for name, task in tasks.items():
        number = task.get_config("num_fewshot")
        if num_fewshot and number == 0:
            notes.append(f"{name} has no examples: its file says so.")
        elif num_fewshot is not None:
            number = num_fewshot
        task.set_config(key="num_fewshot", value=number or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return notes


def _task_manager(tasks: Sequence[str], include: str | Path | None) -> Any:
    """Return the harness's list of tasks, which has all of ``tasks``.

    Raises:
        UsageProblem: it has not, or there is no task file in the folder ``include``.
    """
    if include is not None and not Path(include).is_dir():
        raise UsageProblem(f"include: {include}: there is no such folder")
    if not tasks:
        raise UsageProblem("tasks: no task is named", "arb eval SOURCE --tasks NAME,NAME")

    from lm_eval.tasks import TaskManager

    own: Sequence[str] = ()
    if include is not None:
        manager = TaskManager(include_path=str(include), include_defaults=False)
        own = manager.all_tasks
        if not own:
            raise UsageProblem(
                f"include: {include}: there is no task file in this folder",
                "A task file is YAML, ends in .yaml, and has the key `task`.",
            )
        # The harness's own files, 14,000 of them, take seconds. A group may be of such tasks.
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            # A misspelt name is most often meant to be one of the user's own few.
            close = nearest(task, own) or nearest(task, manager.all_tasks)
            hint = "Name a folder of task files: --include FOLDER"
            if own:
                hint = f"in {include}: {', '.join(own[:_LISTED])}"
            if close:
                hint = f"did you mean {close!r}?"
            raise UsageProblem(f"tasks: there is no task {task!r}", hint)
    return manager


def _hint_for(error: BaseException | None) -> str:
    """Return what helps against an error of the harness, if something is known to."""
    while error is not None:
        if type(error).__name__ in _NETWORK:
            return (
                "The samples of this task are on the Hugging Face hub, which cannot be reached. A "
                "task file of your own with local files needs no network: --include FOLDER"
            )
        error = error.__cause__ or error.__context__
    return ""


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a task without its name and without errors that are not known."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and key != "sample_len"
    }
