"""Counts what of a corpus has no text that could be tokenized."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from megapipe.errors import DataError
from megapipe.words import count_noun, without_surrogates

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class RowCount:
    """Rows of JSON and tables that were read, and what of them was left out or replaced."""

    rows: int = 0
    lacking: int = 0
    """Rows without the field of their text."""
    empty: int = 0
    """Rows whose field holds null or an empty text."""
    lone_surrogates: int = 0
    """Halves of surrogate pairs, which JSON may spell and UTF-8 may not: each is read as "?"."""

    def add(self, other: RowCount) -> None:
        """Count what `other` has counted too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def count_text(self, text: str | None) -> str | None:
        """Count a row that has the field, and return its text."""
        self.rows += 1
        self.empty += not text
        return text

    def replace_surrogates(self, text: str) -> str:
        """Replace and count lone surrogates."""
        whole = without_surrogates(text)
        if whole is not text:
            self.lone_surrogates += len(_SURROGATE.findall(text))
        return whole

    def lines(self, source: str, field: str) -> Iterator[str]:
        """Yield a line for the user on each kind of loss.

        Args:
            source: ``data.source``.
            field: ``data.text_field``.
        """
        for count, what in self._left_out(field):
            yield (
                f"{count:,} of {self.rows:,} rows of {source} {'is' if count == 1 else 'are'} "
                f"left out: {what} (data.text_field)"
            )
        if self.lone_surrogates:
            yield (
                f"{count_noun(self.lone_surrogates, 'lone surrogate')} in {source} (such as "
                "\\ud83d without its other half): each is read as ?"
            )

    def no_text(self, source: str, field: str) -> DataError:
        """Return the error for a corpus without any text, whose rows were counted.

        Args:
            source: ``data.source``.
            field: ``data.text_field``.
        """
        reasons = [
            f"{count:,} of {self.rows:,} rows {'has' if count == 1 else 'have'} {what}"
            for count, what in self._left_out(field)
        ]
        if not reasons:
            return DataError(f"corpus {source!r} is empty: there is no text in it")
        return DataError(f"corpus {source!r} has no text: {', '.join(reasons)} (data.text_field)")

    def _left_out(self, field: str) -> Iterator[tuple[int, str]]:
        """Yield how many rows are left out for a reason, and the reason, where there are any."""
        for count, what in (
            (self.lacking, f"no field {field!r}"),
            (self.empty, f"no text in field {field!r}"),
        ):
            if count:
                yield count, what
