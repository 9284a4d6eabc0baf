"""Rows that are examples: a prompt and its completion, or the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapipe.data.corpus.cutting import TextChunk
from megapipe.data.corpus.json_rows import kind_of, no_object
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.supervised.markup import END, mark_label, plain
from megapipe.data.supervised.turns import ASSISTANT, Message, Template, TemplateError
from megapipe.errors import DataError


@dataclass(frozen=True)
class ExampleRows:
    """Takes examples out of rows. One that has messages is a conversation, whatever else it has.

    Attributes:
        prompt, completion, messages: names of fields.
        tokenizer: its name, for errors.
        template: writes conversations; None: there is none.
        reserved: names of tokens that are plain text in what rows say.
    """

    prompt: str
    completion: str
    messages: str
    tokenizer: str
    template: Template | None
    reserved: tuple[str, ...]
    takes_texts = False

    def reader(self, origin: str, count: RowCount) -> ExampleReader:
        """Each row has to be an example, so there is nothing to count."""
        return ExampleReader(self, origin)

    def columns(self, origin: str, schema: Any) -> list[str]:
        pair = [self.prompt, self.completion]
        found = [name for name in (self.messages, *pair) if name in schema.names]
        if self.messages not in found and found != pair:
            raise DataError(f"{origin} has {self._neither(schema.names)}")
        return found

    def of_table(self, origin: str, table: Any, first: int, count: RowCount) -> Iterator[str]:
        for number, row in enumerate(table.to_pylist(), first):
            yield self.example(row, f"{origin}: row {number}")

    def pieces(self, document: str) -> Iterator[TextChunk]:
        """One: examples are not cut, and have the end marks that they need."""
        yield TextChunk(document, ends=True, end_mark=False)

    def example(self, row: dict[str, Any], place: str) -> str:
        """A row as a text with marks. Raises DataError, with the place, if it is no example."""
        if row.get(self.messages) is not None:
            return self._conversation(row[self.messages], place)
        if self.prompt not in row or self.completion not in row:
            raise DataError(f"{place} has {self._neither(row)}")
        prompt, completion = (
            self._text(row, *field, place)
            for field in ((self.prompt, "prompt_field"), (self.completion, "completion_field"))
        )
        return plain(prompt) + mark_label(plain(completion) + END)

    def _neither(self, names: Any) -> str:
        return (
            f"neither {self.messages!r} (data.messages_field) nor {self.prompt!r} and "
            f"{self.completion!r} (data.prompt_field, data.completion_field); it has: "
            f"{', '.join(map(str, names)) or 'nothing'}"
        )

    def _text(self, row: dict[str, Any], name: str, key: str, place: str) -> str:
        text = row[name]
        if not isinstance(text, str):
            raise DataError(f"{place}: field {name!r} (data.{key}) holds {kind_of(text)}, no text")
        if not text:
            raise DataError(f"{place}: field {name!r} (data.{key}) is empty: expected a text")
        return text

    def _conversation(self, messages: Any, place: str) -> str:
        where = f"{place}: field {self.messages!r} (data.messages_field)"
        if not isinstance(messages, list):
            raise DataError(f"{where} holds {kind_of(messages)}, no list of messages")
        known = [
            known_message(message, number, where) for number, message in enumerate(messages, 1)
        ]
        if not any(message["role"] == ASSISTANT for message in known):
            raise DataError(
                f"{where} has no message of role {ASSISTANT!r}: nothing is to be learned"
            )
        if self.template is None:
            raise DataError(
                f"{place}: a conversation needs a chat template, which tokenizer "
                f"{self.tokenizer!r} does not have: expected data.chat_template=FILE"
            )
        try:
            return self.template.marked(known, self.reserved)
        except TemplateError as error:
            raise DataError(f"{place}: {error}") from error


class ExampleReader:
    """Takes examples out of the rows of a JSON file; each row has to be one."""

    def __init__(self, rows: ExampleRows, origin: str) -> None:
        self.rows = rows
        self.origin = origin

    def text(self, row: Any, line: int) -> str:
        if not isinstance(row, dict):
            raise no_object(self.origin, row, line)
        return self.rows.example(row, f"{self.origin}: line {line}")

    def finish(self) -> None:
        """Nothing is left to be said: every row was looked at by itself."""


def known_message(message: Any, number: int, where: str) -> Message:
    """A message without fields that hold nothing, as tables have them. Raises DataError if it has
    no role, or a content that is none."""
    if not isinstance(message, dict):
        raise DataError(f"{where}: message {number} is {kind_of(message)}, no object with a role")
    found = {key: value for key, value in message.items() if value is not None}
    role, content = found.get("role"), found.get("content", "")
    if not isinstance(role, str):
        raise DataError(f"{where}: message {number} has no role: expected system, user, assistant")
    if not isinstance(content, str | list):
        raise DataError(f"{where}: message {number} has a content of {kind_of(content)}, no text")
    return found
