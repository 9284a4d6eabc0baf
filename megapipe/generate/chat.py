"""Conversations that a model goes on with, by its tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megapipe.data.supervised.corpus import template_of
from megapipe.data.supervised.markup import encode
from megapipe.data.supervised.rows import known_message
from megapipe.data.supervised.turns import Message, Template, TemplateError
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.generate.generator import Prompt
from megapipe.inference.source import ModelInfo


class Chats:
    """Writes conversations as the model has seen them in training, up to the assistant's turn.

    Args:
        template: a file of a template; default: that of the run (``data.chat_template``), else the
            tokenizer's.

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
        """A conversation as tokens; raises DataError if the template refuses it."""
        try:
            text = self._template.prompted(messages, self._tokenizer.reserved)
        except TemplateError as error:
            raise DataError(f"--chat: {error}") from error
        ids, _ = encode(text, self._tokenizer)
        return Prompt(tuple(map(int, ids)), self._turn_ends)

    def _ends(self) -> frozenset[int]:
        """The token that the template writes behind a turn; none if it is text."""
        try:
            behind = self._template.behind_a_turn()
        except TemplateError as error:
            raise DataError(f"--chat: {error}") from error
        names = set(self._tokenizer.added_tokens.values())
        ids = self._tokenizer.encode_rendered(behind).ids.tolist() if behind else []
        return frozenset([token for token in ids if token in names][:1])


def messages_of(prompt: str, system: str | None) -> list[Message]:
    """The conversation that a prompt is: a list of messages in JSON, or else what a user says.

    Raises:
        DataError: a message is none.
        ConfigError: there is a system message beside `system`.
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
