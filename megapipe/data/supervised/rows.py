"""Rows that are examples: a prompt and a completion, or the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapipe.data.corpus.json_rows import kind_of, no_object
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.text_chunks import TextChunk
from megapipe.data.supervised.chat_turns import ASSISTANT, Message, Template, TemplateError
from megapipe.data.supervised.markup import END, mark_label, plain
from megapipe.errors import DataError


@dataclass(frozen=True)
class ExampleRows:
    """Parser that takes examples from rows. A row with messages is always a conversation.

    Attributes:
        prompt, completion, messages: names of the rows' fields.
        tokenizer: name of the tokenizer, for errors.
        template: template that renders conversations; None if there is none.
        reserved: names of tokens; in a row they are plain text.
    """

    prompt: str
    completion: str
    messages: str
    tokenizer: str
    template: Template | None
    reserved: tuple[str, ...]
    takes_texts = False

    def reader(self, origin: str, count: RowCount) -> ExampleReader:
        """Return a reader of examples; `count` is unused, as every row must be an example."""
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
        """Yield the example as one chunk: it is not cut, and has its EOS tokens already."""
        yield TextChunk(document, ends=True, append_eos=False)

    def example(self, row: dict[str, Any], row_name: str) -> str:
        """Return the example in a row as a marked text. Raises DataError for an invalid row; the
        error's text begins with `row_name`."""
        if row.get(self.messages) is not None:
            return self._conversation(row[self.messages], row_name)
        if self.prompt not in row or self.completion not in row:
            raise DataError(f"{row_name} has {self._neither(row)}")
        prompt, completion = (
            self._text(row, *field, row_name)
            for field in ((self.prompt, "prompt_field"), (self.completion, "completion_field"))
        )
        return plain(prompt) + mark_label(plain(completion) + END)

    def _neither(self, names: Any) -> str:
        return (
            f"neither {self.messages!r} (data.messages_field) nor {self.prompt!r} and "
            f"{self.completion!r} (data.prompt_field, data.completion_field); it has: "
            f"{', '.join(map(str, names)) or 'nothing'}"
        )

    def _text(self, row: dict[str, Any], name: str, key: str, row_name: str) -> str:
        text = row[name]
        if not isinstance(text, str):
            raise DataError(
                f"{row_name}: field {name!r} (data.{key}) holds {kind_of(text)}, not text"
            )
        if not text:
            raise DataError(f"{row_name}: field {name!r} (data.{key}) is empty: expected a text")
        return text

    def _conversation(self, messages: Any, row_name: str) -> str:
        where = f"{row_name}: field {self.messages!r} (data.messages_field)"
        if not isinstance(messages, list):
            raise DataError(f"{where} holds {kind_of(messages)}, not a list of messages")
        known = [
            known_message(message, number, where) for number, message in enumerate(messages, 1)
        ]
        if not any(message["role"] == ASSISTANT for message in known):
            raise DataError(
                f"{where} has no message of role {ASSISTANT!r}: there is nothing to learn from it"
            )
        if self.template is None:
            raise DataError(
                f"{row_name}: a conversation needs a chat template, which tokenizer "
                f"{self.tokenizer!r} does not have: expected data.chat_template=FILE"
            )
        try:
            return self.template.marked(known, self.reserved)
        except TemplateError as error:
            raise DataError(f"{row_name}: {error}") from error


class ExampleReader:
    """Takes an example from each row of a JSON file."""

    def __init__(self, rows: ExampleRows, origin: str) -> None:
        self.rows = rows
        self.origin = origin

    def text(self, row: Any, line: int) -> str:
        if not isinstance(row, dict):
            raise no_object(self.origin, row, line)
        return self.rows.example(row, f"{self.origin}: line {line}")

    def finish(self) -> None:
        """Do nothing: :meth:`text` has checked each row."""


def known_message(message: Any, number: int, where: str) -> Message:
    """Return a message without null fields, which tables add. Raises DataError if the message has
    no role, or its content is neither text nor a list."""
    if not isinstance(message, dict):
        raise DataError(
            f"{where}: message {number} is {kind_of(message)}, not an object with a role"
        )
    found = {key: value for key, value in message.items() if value is not None}
    role, content = found.get("role"), found.get("content", "")
    if not isinstance(role, str):
        raise DataError(f"{where}: message {number} has no role: expected system, user, assistant")
    if not isinstance(content, str | list):
        raise DataError(f"{where}: message {number} has a content of {kind_of(content)}, not text")
    return found
