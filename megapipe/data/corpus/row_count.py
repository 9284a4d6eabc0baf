"""Counts of a corpus's rows, and of rows without a text to tokenize."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from megapipe.errors import DataError
from megapipe.text import count_noun, without_surrogates

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class RowCount:
    """Number of rows read from JSON and tables, and how many were skipped or changed."""

    rows: int = 0
    lacking: int = 0
    """Number of rows without the text field."""
    empty: int = 0
    """Number of rows whose text field is null or empty."""
    lone_surrogates: int = 0
    """Number of lone surrogates, which JSON allows and UTF-8 does not; each is read as "?"."""

    def add(self, other: RowCount) -> None:
        """Add the counts of `other`."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def count_text(self, text: str | None) -> str | None:
        """Count a row whose text field is `text`, and return `text`."""
        self.rows += 1
        self.empty += not text
        return text

    def replace_surrogates(self, text: str) -> str:
        """Return the text with lone surrogates replaced, and count them."""
        whole = without_surrogates(text)
        if whole is not text:
            self.lone_surrogates += len(_SURROGATE.findall(text))
        return whole

    def lines(self, source: str, field: str) -> Iterator[str]:
        """Yield lines of text that tell the user which rows were skipped or changed.

        Args:
            source: ``data.source``.
            field: ``data.text_field``.
        """
        for count, what in self._left_out(field):
            yield (
                f"{count:,} of {self.rows:,} rows of {source} {'is' if count == 1 else 'are'} "
                f"skipped: {what} (data.text_field)"
            )
        if self.lone_surrogates:
            yield (
                f"{count_noun(self.lone_surrogates, 'lone surrogate')} in {source} (such as "
                "\\ud83d without its other half): each is read as ?"
            )

    def no_text(self, source: str, field: str) -> DataError:
        """Return the error for a corpus without any text; the counts give the reasons.

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
        """Yield, for each reason to skip rows, the number of skipped rows and the reason."""
        for count, what in (
            (self.lacking, f"no field {field!r}"),
            (self.empty, f"no text in field {field!r}"),
        ):
            if count:
                yield count, what
