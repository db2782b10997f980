"""The phase ``load_teacher``: a pretrained model becomes the stage ``teacher``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from attrs import define

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_train.capabilities import attachments, baselines
from arb_ternary_train.directory import write_json
from arb_ternary_upcycle.calibration import held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.probe import probe_loss
from arb_ternary_upcycle.stage_options import LoadTeacherConfig
from arb_ternary_upcycle.stage_phase import Stage, StagePhase
from arb_ternary_upcycle.stages import stage_folder
from arb_ternary_upcycle.student import check_student, student_of
from arb_ternary_upcycle.teacher import PretrainedModel, read_teacher

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Longest sample of the probe. With a teacher's whole context there would be few samples of much
#: work.
_LONGEST = 256
#: Token ids whose text the tokenizers of teacher and data are compared on.
_COMPARED = 2048


@define(eq=False)
class LoadTeacherPhase(StagePhase):
    """Reads the teacher, compares it with data and student, writes the stage, tests its loss."""

    name = "load_teacher"

    config: LoadTeacherConfig

    def prepare(self, context: TrainingContext) -> Stage:
        """See ``StagePhase``."""
        config = self.config
        teacher = read_teacher(config.teacher, config.dtype)
        for note in teacher.notes:
            context.note(f"{config.teacher}: {note}")
        check_student(context.model, teacher.config)
        _check_tokenizer(context, teacher, config.teacher)
        return Stage(
            folder=stage_folder(context, "teacher"),
            config=teacher.config,
            vocabulary_size=teacher.model.vocabulary_size,
            tokenizer=teacher.tokenizer,
            dtype=config.dtype,
            origin={"weights": teacher.digest()},
            blocks=teacher.blocks,
            ends=teacher.ends,
        )

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Return loss and perplexity on held-out text.

        Raises:
            DataError: one of them is too high.
        """
        config = self.config
        if config.probe_tokens == 0:
            return {}
        block_size = min(_LONGEST, student_of(context.model).config.max_length)
        tokens = held_out_tokens(context, tokens=config.probe_tokens, block_size=block_size)
        nll = probe_loss(model, tokens)
        perplexity = math.exp(min(nll, 700))
        context.note(
            f"teacher: {nll:.4f} nats per token of held-out text in samples of {block_size}, "
            f"perplexity {perplexity:,.2f}"
        )

        if config.max_nll is None:
            limits = _loss_of_simple_predictor(context, block_size)
        else:
            limits = {"max_nll": config.max_nll}
        if config.max_perplexity is not None:
            limits["max_perplexity"] = math.log(config.max_perplexity)
        for name, limit in limits.items():
            if not nll <= limit:
                raise DataError(
                    f"{config.teacher}: {nll:.4f} nats per token of held-out text; the limit is "
                    f"{limit:.4f}, {name}",
                    "Its weights are damaged, or it has another tokenizer or language. Choose text "
                    "that it knows, or raise max_nll.",
                )
        return {"teacher_nll": nll, "teacher_perplexity": perplexity}


def _loss_of_simple_predictor(context: TrainingContext, block_size: int) -> dict[str, float]:
    """Return what token frequencies reach, by a description; else what a uniform guess reaches."""
    data = context.data
    known = baselines(data, block_size)
    if "unigram_entropy" in known:
        return {"which the frequencies of tokens give": known["unigram_entropy"]}
    return {"which a uniform guess gives": math.log(data.vocabulary_size)}


def _check_tokenizer(context: TrainingContext, teacher: PretrainedModel, source: str) -> None:
    """Check that a token id means the same to data and teacher.

    Raises:
        ConfigError: it does not. The teacher's tokenizer is then in a file that ``data.tokenizer``
            can name.
    """
    fault = _tokenizer_fault(context, teacher)
    if fault is None:
        return
    hint = "Give data that was encoded with the teacher's tokenizer."
    if teacher.tokenizer is not None and teacher.tokenizer["kind"] != "ids":
        file = stage_folder(context, "teacher").with_name("teacher-tokenizer.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, teacher.tokenizer)
        hint = (
            f"The teacher's is written to {file}: set `data.tokenizer` to a copy of it, and start "
            f"again."
        )
    raise ConfigError(f"data: its tokenizer is not that of {source}: {fault}", hint)


def _tokenizer_fault(context: TrainingContext, teacher: PretrainedModel) -> str | None:
    data = context.data
    ours = attachments(data).get("tokenizer")
    theirs = teacher.tokenizer
    # A tokenizer of the kind "ids" knows no text to compare.
    if ours is not None and theirs is not None and "ids" not in (ours["kind"], theirs["kind"]):
        fault = _difference(from_json(ours), from_json(theirs), data)
        if fault is not None:
            return fault
    mine = student_of(context.model).vocabulary_size
    if mine != teacher.model.vocabulary_size:
        return f"the data has {mine} ids and the teacher {teacher.model.vocabulary_size}"
    return None


def _difference(ours: Tokenizer, theirs: Tokenizer, data: Any) -> str | None:
    """Say how the tokenizers disagree on held-out text; None if they agree."""
    batches = data.held_out(1, 64, -(-_COMPARED // 64))
    ids: list[int] = []
    for batch in islice(batches, _COMPARED // 64):
        ids += batch.data.flatten().tolist()
    text = ours.decode(ids)
    mine = ours.encode(text)
    its = theirs.encode(text)
    if mine == its:
        return None
    place = 0
    while mine[place : place + 1] == its[place : place + 1]:
        place += 1
    start = ours.decode(mine[place : place + 8])
    return (
        f"{start!r} begins with {mine[place : place + 3]}, with the teacher's "
        f"{its[place : place + 3]}"
    )
