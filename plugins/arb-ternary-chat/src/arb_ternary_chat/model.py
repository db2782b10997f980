"""A language model to compute with, from a run or from files of another program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_text.chat.answers import encode_rendered
from arb_ternary_text.chat.template import ChatTemplate, Message, chat_template
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import (
    Tokenizer,
    attached_tokenizer,
    encode_prompt,
    special_tokens,
)
from arb_ternary_text.models.generate import (
    CachedModel,
    CachedReader,
    generate,
    streamed_text,
    text_until,
)
from arb_ternary_train.model_source import open_model, read_source


@frozen(eq=False)
class Model:
    """A language model and its tokenizer, in evaluation mode.

    Attributes:
        module: the network; ``module(tokens_BS)`` returns logits ``[B, S, V]``.
        tokenizer: text to ids and back, with the special tokens and the chat template.
        config: the ``model:`` section of a run's config, with its ``name``.
        device: where the module is.
        backend: name of the kernel backend that the module was loaded for.
        source: where it came from, as the user wrote it.
        notes: what could not be mapped when it was read, one sentence each.
        step: the training step of a run's checkpoint; None for files of other programs.
    """

    module: nn.Module
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    device: torch.device
    backend: str
    source: str
    notes: tuple[str, ...] = ()
    step: int | None = None

    @property
    def special(self) -> SpecialTokens:
        """Special tokens and chat template; a base model may have none."""
        return special_tokens(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: there is none, or it has a syntax error.
            EnvironmentProblem: jinja2 is not installed.
        """
        return chat_template(self.tokenizer)

    @property
    def context(self) -> int | None:
        """Largest number of tokens that the model reads; None with a sliding window."""
        causal = self.causal
        return None if causal.sliding_window is not None else causal.max_length

    @property
    def causal(self) -> CachedModel:
        """The module as a model that draws one token after another.

        Raises:
            UsageProblem: it is not such a model.
        """
        if not isinstance(self.module, CachedModel):
            raise UsageProblem(
                f"{self.source}: the model {self.config.get('name')!r} does not draw one token "
                f"after another: it has no new_cache()"
            )
        return self.module

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the ids of a text to continue, or of a conversation to answer.

        Letters that spell a control token are letters, in both.

        Raises:
            DataError: it is a conversation, and there is no chat template, or it refuses it.
        """
        if not isinstance(prompt, str):
            rendered = self.template.render(prompt, add_generation_prompt=True)
            return encode_rendered(self.tokenizer, rendered)[0]
        return encode_prompt(self.tokenizer, prompt)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return the logits after each token, on the device of the model.

        Args:
            tokens: ids, ``[S]`` or ``[B, S]``.

        Returns:
            ``[S, V]`` or ``[B, S, V]``: at each position, what follows it.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        if ids.dim() == 1:
            alone: Tensor = self.module(ids[None])[0]
            return alone
        logits_BSV: Tensor = self.module(ids)
        return logits_BSV

    def generate(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """Return the continuation of a text, or the answer to a conversation, as a whole.

        The arguments are those of :meth:`stream`.
        """
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[str] = (),
        reader: CachedReader | None = None,
        observe: Callable[[int], object] | None = None,
    ) -> Iterator[str]:
        """Yield the continuation of a text, or the answer to a conversation, as it is drawn.

        It ends at any end token of the tokenizer, at a stop string, or after ``max_new_tokens``.

        Args:
            prompt: a text, or messages ``{"role": ..., "content": ...}``.
            max_new_tokens: largest number of tokens to draw.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: draw among the ``top_k`` most likely tokens only; None = all.
            top_p: draw among the most likely tokens that together reach this probability.
            seed: seed of the draws; None = a different one every time.
            stop: strings that end the text; they are left out.
            reader: keeps keys and values between calls: only what differs from the text that it
                has read is read.
            observe: called with each id that was drawn, before its text is yielded.

        Raises:
            UsageProblem: a value is out of range. It is raised by the call.
        """
        ids = self.encode(prompt)
        # At least one id is read.
        unread = ids if reader is None else ids[reader.keep(ids[:-1]) :]
        drawn = generate(
            self.causal,
            unread,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=self.special.eos,
            device=self.device,
            reader=reader,
        )

        def observed() -> Iterator[int]:
            for token in drawn:
                if observe is not None:
                    observe(token)
                yield token

        return text_until(streamed_text(self.tokenizer, ids, observed()), stop)


def load_model(
    source: str | Path,
    *,
    device: str | None = None,
    backend: str | None = None,
    accumulators: bool = False,
) -> Model:
    """Load a language model to compute with. Nothing is written.

    Args:
        source: a run directory, a checkpoint, a GGUF file, a Hugging Face folder, a safetensors
            file, or ``hf://org/name``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``mps``; None: the run's own, or the CPU.
        backend: kernel backend; None: that of the environment, of the run, or the best one.
        accumulators: allocate the accumulators of ternary modules, a byte per weight, without
            which the model cannot learn.

    Raises:
        UsageProblem: there is no such file, or no tokenizer with it.
        DataError: it is damaged, or this program cannot hold such a model.
    """
    opened = open_model(source, backend=backend, device=device, accumulators=accumulators)
    found = opened.source
    return Model(
        module=opened.module,
        tokenizer=attached_tokenizer(found.attachments, found.shown),
        config=found.model,
        device=opened.device,
        backend=opened.backend,
        source=found.shown,
        notes=found.notes,
        step=None if opened.run is None else opened.run.checkpoint.step,
    )


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load the tokenizer of a language model, and no weights.

    Args:
        source: as for :func:`load_model`.

    Raises:
        UsageProblem: there is no such file.
        DataError: there is no tokenizer with it, or it is damaged.
    """
    found = read_source(source)
    return attached_tokenizer(found.attachments, found.shown)
