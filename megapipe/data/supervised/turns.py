"""Conversations written by a chat template, and the assistant's turns found in what it writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megapipe.data.supervised.markup import count, sanitized
from megapipe.words import one_line

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Message = dict[str, Any]
Span = tuple[int, int]
ASSISTANT = "assistant"
_SAID = "megapipe"
"""Something that an assistant may say, and no template writes by itself."""


class TemplateError(ValueError):
    """A conversation that a template cannot write, or in which the turns are not to be found."""


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja, rendered as `transformers` does.

    Attributes:
        text: the template.
        names: texts that it may ask for, such as that of ``eos_token``.
        train_on: all of the assistant's turns count, or the last one alone.
    """

    text: str
    names: dict[str, str]
    train_on: Literal["all", "last"]

    def marked(self, messages: Sequence[Message], reserved: Collection[str]) -> str:
        """A conversation as a text with marks. What a message spells of `reserved` names of tokens
        is plain.

        The turns are those that a template marks itself by ``{% generation %}``; one without such
        marks has to write the beginning of a conversation as it writes it in the whole, and a turn
        is what it adds to the beginning and the prompt for the turn.

        Raises:
            TemplateError: the template refuses the conversation, or its turns are not to be found.
        """
        messages = [sanitized(message, reserved) for message in messages]
        if _GENERATION.search(self.text):
            text, spans = self._render(messages, generation=True)
            if not spans:
                raise TemplateError("the chat template marks nothing of it with {% generation %}")
            return count(text, spans if self.train_on == "all" else spans[-1:])
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        text, _ = self._render(messages)
        chosen = turns if self.train_on == "all" else turns[-1:]
        return count(text, [self._span(messages, text, turn) for turn in chosen])

    def prompted(self, messages: Sequence[Message], reserved: Collection[str]) -> str:
        """A conversation and the beginning of the assistant's next turn, as a text with marks. What
        a message spells of `reserved` names of tokens is plain. Raises TemplateError."""
        sane = [sanitized(message, reserved) for message in messages]
        return self._render(sane, prompt=True)[0]

    def behind_a_turn(self) -> str:
        """The text that comes behind what the assistant says. Raises TemplateError."""
        said = {"role": ASSISTANT, "content": _SAID}
        text, _ = self._render([{"role": "user", "content": "?"}, said])
        return text.rpartition(_SAID)[2]

    def _span(self, messages: list[Message], text: str, turn: int) -> Span:
        """Where a turn is in the text of the conversation."""
        before, _ = self._render(messages[:turn], prompt=True)
        after = text
        if turn + 1 < len(messages):
            after, _ = self._render(messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            last = "" if self.train_on == "last" else ", data.train_on=last"
            raise TemplateError(
                f"the chat template writes message {turn + 1}, or what is before it, otherwise "
                "when the conversation goes on, so that the assistant's turn is not to be found: "
                f"expected a template with {{% generation %}}{last}, or data.chat_template=FILE"
            )
        if len(before) == len(after):
            raise TemplateError(f"the chat template writes nothing for message {turn + 1}")
        return len(before), len(after)

    def _render(
        self, messages: list[Message], *, prompt: bool = False, generation: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, with a prompt for the assistant's turn or without; and what is marked in it."""
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
