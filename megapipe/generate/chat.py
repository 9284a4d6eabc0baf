"""Conversations that a model continues, rendered with its tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megapipe.data.supervised.chat_turns import Message, Template, TemplateError
from megapipe.data.supervised.corpus import template_of
from megapipe.data.supervised.markup import encode
from megapipe.data.supervised.rows import known_message
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.generate.generator import Prompt
from megapipe.inference.source import ModelInfo


class Chats:
    """Renders conversations as the model saw them in training, up to the assistant's next turn.

    Args:
        template: a template file; default: the template of the run (``data.chat_template``), else
            the tokenizer's.

    Raises:
        DataError: there is no template, or it fails.
    """

    def __init__(self, source: ModelInfo, template: str | None = None) -> None:
        self._tokenizer: Tokenizer = source.tokenizer
        chat = self._tokenizer.chat
        if template is None:
            found = template_of(source.data, chat)
        else:
            chosen = source.data.model_copy(update={"chat_template": template})
            found = template_of(chosen, chat, "--chat-template ")
        if found is None:
            raise DataError(
                "--chat needs a chat template, which the tokenizer does not have: expected "
                "--chat-template FILE"
            )
        self._template: Template = found
        self._turn_ends = self._ends()

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Render and tokenize a conversation. Raises DataError if the template refuses it."""
        try:
            text = self._template.prompted(messages, self._tokenizer.reserved)
        except TemplateError as error:
            raise DataError(f"--chat: {error}") from error
        ids, _ = encode(text, self._tokenizer)
        return Prompt(tuple(map(int, ids)), self._turn_ends)

    def _ends(self) -> frozenset[int]:
        """Return the token that the template writes after a turn; an empty set if it writes no
        special token."""
        try:
            behind = self._template.behind_a_turn()
        except TemplateError as error:
            raise DataError(f"--chat: {error}") from error
        names = set(self._tokenizer.added_tokens.values())
        ids = self._tokenizer.encode_rendered(behind).ids.tolist() if behind else []
        return frozenset([token for token in ids if token in names][:1])


def messages_of(prompt: str, system: str | None) -> list[Message]:
    """Return the conversation in `prompt`: a JSON list of messages, or else one user message.

    Raises:
        DataError: an item of the list is not a message.
        ConfigError: `system` is given and the conversation has a system message.
    """
    try:
        found: Any = json.loads(prompt)
    except ValueError:
        found = None
    if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
        messages = [known_message(each, i, "--chat") for i, each in enumerate(found, 1)]
    else:
        messages = [{"role": "user", "content": prompt}]
    if system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise ConfigError("--system: the conversation has a system message already")
    return [{"role": "system", "content": system}, *messages]
