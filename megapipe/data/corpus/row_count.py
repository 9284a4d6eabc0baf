"""How many rows of a corpus have no text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RowCount:
    """Rows of JSON that were read, and those of them that lack the field of their text."""

    rows: int = 0
    lacking: int = 0

    def add(self, other: RowCount) -> None:
        """Count what `other` has counted too."""
        self.rows += other.rows
        self.lacking += other.lacking

    def line(self, source: str, field: str) -> str | None:
        """A line for the user on the rows of `source`; None where none is left out."""
        if not self.lacking:
            return None
        return (
            f"{self.lacking:,} of {self.rows:,} rows of {source} have no field {field!r} "
            "(data.text_field): they are left out"
        )
