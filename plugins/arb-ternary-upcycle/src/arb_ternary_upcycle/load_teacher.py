"""The phase ``load_teacher``: a pretrained model becomes the stage ``teacher``, once it is known to
be of use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_train.directory import write_json
from arb_ternary_train.protocols import Attachments, Baselines
from arb_ternary_upcycle.calibration import held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.probe import probe_loss
from arb_ternary_upcycle.stage_options import LoadTeacherConfig
from arb_ternary_upcycle.stage_phase import StagePhase
from arb_ternary_upcycle.stages import stage_folder
from arb_ternary_upcycle.student import check_student, student_of
from arb_ternary_upcycle.teacher import PretrainedModel, read_teacher

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Longest sample of the probe; a teacher's whole context would make few samples of much work.
_LONGEST = 256
#: Ids by whose text two tokenizers are compared.
_COMPARED = 2048


class LoadTeacherPhase(StagePhase):
    """Reads the teacher, compares it with data and student, writes the stage, measures its loss."""

    name = "load_teacher"

    def __init__(self, config: LoadTeacherConfig) -> None:
        self.config = config
        self._teacher: PretrainedModel | None = None

    def writer(self, context: TrainingContext) -> FloatModelWriter:
        """See ``StagePhase``."""
        config = self.config
        teacher = self._teacher = read_teacher(config.teacher, config.dtype)
        for note in teacher.notes:
            context.note(f"{config.teacher}: {note}")
        check_student(context.model, teacher.config)
        _check_tokenizer(context, teacher, config.teacher)
        return FloatModelWriter(
            stage_folder(context, "teacher"),
            teacher.config,
            teacher.model.vocabulary_size,
            teacher.tokenizer,
            config.dtype,
            origin=teacher.origin,
        )

    def ends(self) -> Mapping[str, Tensor]:
        """See ``StagePhase``."""
        return self._read.ends()

    def blocks(self, done: frozenset[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See ``StagePhase``."""
        return ((number, tensors) for number, tensors in self._read.blocks() if number not in done)

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """The loss on held-out text; DataError where it is too high."""
        self._teacher = None  # its memory is free from here on
        config = self.config
        if config.probe_tokens == 0:
            return {}
        block_size = min(_LONGEST, student_of(context.model).config.max_length)
        nll = probe_loss(
            model, held_out_tokens(context, tokens=config.probe_tokens, block_size=block_size)
        )
        limits = (
            {"max_nll": config.max_nll}
            if config.max_nll is not None
            else _entropy(context, block_size)
        )
        if config.max_perplexity is not None:
            limits["max_perplexity"] = math.log(config.max_perplexity)
        context.note(
            f"teacher: {nll:.4f} nats a token of held-out text, perplexity "
            f"{math.exp(min(nll, 700)):,.2f}"
        )
        for name, limit in limits.items():
            if not nll <= limit:
                raise DataError(
                    f"{config.teacher}: {nll:.4f} nats a token of held-out text; the limit is "
                    f"{limit:.4f}, {name}",
                    "Its weights are damaged, or its tokenizer or language is another. Choose text "
                    "that it knows, or raise max_nll.",
                )
        return {"teacher_nll": nll, "teacher_perplexity": math.exp(min(nll, 700))}

    @property
    def _read(self) -> PretrainedModel:
        if self._teacher is None:
            raise RuntimeError("the teacher has not been read")
        return self._teacher


def _entropy(context: TrainingContext, block_size: int) -> dict[str, float]:
    """What the simplest predictor reaches, by what it is called; of sources that do not tell, a
    uniform guess.
    """
    data = context.data
    known = data.baselines(block_size) if isinstance(data, Baselines) else {}
    if "unigram_entropy" in known:
        return {"what frequencies of tokens give": known["unigram_entropy"]}
    return {"a uniform guess": math.log(data.vocabulary_size)}


def _check_tokenizer(context: TrainingContext, teacher: PretrainedModel, source: str) -> None:
    """Data and teacher have to mean the same by an id.

    Raises:
        ConfigError: they do not. The teacher's tokenizer is then in a file that ``data.tokenizer``
            can name.
    """
    model = student_of(context.model)
    data = context.data
    given = data.attachments().get("tokenizer") if isinstance(data, Attachments) else None
    fault = ""
    if (
        teacher.tokenizer is not None
        and given is not None
        and {"ids"}.isdisjoint(_kinds(teacher.tokenizer, given))
    ):
        fault = _difference(from_json(given), from_json(teacher.tokenizer), data, context)
    if not fault and model.vocabulary_size != teacher.model.vocabulary_size:
        fault = (
            f"the data has {model.vocabulary_size} ids and the teacher "
            f"{teacher.model.vocabulary_size}"
        )
    if not fault:
        return
    hint = "Give data that was encoded with the teacher's tokenizer."
    if teacher.tokenizer is not None and teacher.tokenizer["kind"] != "ids":
        file = stage_folder(context, "teacher").with_name("teacher-tokenizer.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, teacher.tokenizer)
        hint = (
            f"The teacher's is written to {file}: set `data.tokenizer` to a copy of it, and "
            f"start anew."
        )
    raise ConfigError(f"data: its tokenizer is not that of {source}: {fault}", hint)


def _kinds(*tokenizers: Mapping[str, Any]) -> set[str]:
    return {str(tokenizer["kind"]) for tokenizer in tokenizers}


def _difference(ours: Tokenizer, theirs: Tokenizer, data: Any, context: TrainingContext) -> str:
    """How the tokenizers disagree on held-out text; empty where they agree."""
    batches = data.held_out(1, 64, -(-_COMPARED // 64))
    ids = [int(i) for batch in islice(batches, _COMPARED // 64) for i in batch.data.flatten()]
    text = ours.decode(ids)
    one = ours.encode(text)
    other = theirs.encode(text)
    if one == other:
        return ""
    place = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    start = ours.decode(one[place : place + 8])
    return (
        f"{start!r} begins with {one[place : place + 3]}, with the teacher's "
        f"{other[place : place + 3]}"
    )


def build(config: LoadTeacherConfig) -> LoadTeacherPhase:
    """The factory that the phase ``load_teacher`` registers."""
    return LoadTeacherPhase(config)
