"""Conversations rendered by a chat template, and where the assistant's turns are in the text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megapipe.data.supervised.markup import mark_spans, sanitized
from megapipe.text import one_line

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Message = dict[str, Any]
Span = tuple[int, int]
ASSISTANT = "assistant"
_PROBE = "megapipe"
"""Message in :meth:`Template.behind_a_turn`; it must be a word that no chat template contains."""


class TemplateError(ValueError):
    """Raised when a template cannot render a conversation, or a turn cannot be located."""


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja, rendered with `transformers`.

    Attributes:
        text: the template.
        names: texts that the template may use, by name, for example ``eos_token``.
        train_on: whether all turns of the assistant count in the loss, or only the final turn.
    """

    text: str
    names: dict[str, str]
    train_on: Literal["all", "last"]

    def marked(self, messages: Sequence[Message], reserved: Collection[str]) -> str:
        """Render a conversation as a text in which the assistant's turns are marked as labels. In a
        message, names of `reserved` tokens are plain text.

        The turns are the parts that the template marks with ``{% generation %}``. Without that mark
        a turn is the text that its message adds to the rendered earlier messages with the prompt
        for the assistant. So the template must render the first messages of a conversation in the
        same way, whatever follows.

        Raises:
            TemplateError: the template refuses the conversation, or a turn cannot be located.
        """
        messages = [sanitized(message, reserved) for message in messages]
        if _GENERATION.search(self.text):
            text, spans = self._render(messages, generation=True)
            if not spans:
                raise TemplateError("the chat template marks no part of it with {% generation %}")
            return mark_spans(text, spans if self.train_on == "all" else spans[-1:])
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        text, _ = self._render(messages)
        chosen = turns if self.train_on == "all" else turns[-1:]
        return mark_spans(text, [self._span(messages, text, turn) for turn in chosen])

    def prompted(self, messages: Sequence[Message], reserved: Collection[str]) -> str:
        """Render a conversation and the prompt for the assistant's next turn. Names of `reserved`
        tokens in a message are marked as plain text. Raises TemplateError."""
        sane = [sanitized(message, reserved) for message in messages]
        return self._render(sane, prompt=True)[0]

    def behind_a_turn(self) -> str:
        """Return what the template writes after an assistant's message. Raises TemplateError."""
        answer = {"role": ASSISTANT, "content": _PROBE}
        text, _ = self._render([{"role": "user", "content": "?"}, answer])
        return text.rpartition(_PROBE)[2]

    def _span(self, messages: list[Message], text: str, turn: int) -> Span:
        """Return start and stop of the turn of message number `turn` in the whole text `text`."""
        before, _ = self._render(messages[:turn], prompt=True)
        after = text
        if turn + 1 < len(messages):
            after, _ = self._render(messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            last = "" if self.train_on == "last" else ", data.loss_turns=last"
            raise TemplateError(
                f"the chat template renders message {turn + 1}, or an earlier one, "
                "differently once the conversation continues, so the assistant's turn cannot "
                f"be located: use a template with {{% generation %}}{last}, or "
                "data.chat_template=FILE"
            )
        if len(before) == len(after):
            raise TemplateError(f"the chat template writes nothing for message {turn + 1}")
        return len(before), len(after)

    def _render(
        self, messages: list[Message], *, prompt: bool = False, generation: bool = False
    ) -> tuple[str, list[Span]]:
        """Render messages, with `prompt` followed by the prompt for the assistant. Return the text,
        and with `generation` the spans that the template marks with ``{% generation %}``."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            (text,), spans = render(
                conversations=[messages],
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=generation,
                **self.names,
            )
        except Exception as error:  # whatever a template raises
            raise TemplateError(f"the chat template fails ({one_line(error)})") from error
        return text, [
            (start, stop) for start, stop in (spans[0] if generation else ()) if stop > start
        ]
