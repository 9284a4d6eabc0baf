"""Characters of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.data.tokenizer import Tokenizer

UNKNOWN = "\ufffd"
"""The character that a tokenizer makes of bytes that are none, or not yet."""
MOST_UNKNOWN = 3
"""Most unknown characters at a text's end that the next token may complete to a character."""


class TextStream:
    """Returns text as it becomes certain: whole characters, and no beginning of a stop string.

    `stopped` tells that a stop string came up; that string and all after it are not returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._ids: list[int] = []
        """Tokens since the last boundary but one; what is before has no influence."""
        self._boundary = 0
        """How many of `_ids` come before the last boundary, a place between two characters."""
        self._given = ""
        """The text of `_ids` that is certain."""

    def add(self, token: int) -> str:
        """The text that becomes certain by one more token."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids)
        unknown = min(len(text) - len(text.rstrip(UNKNOWN)), MOST_UNKNOWN)
        if not text.startswith(self._given):  # some decoders take a run of bytes as a whole
            if unknown and len(self._ids) - self._boundary <= MOST_UNKNOWN:
                return ""
            self._ids, self._boundary, self._given = self._ids[self._boundary :], 0, ""
            text = self.tokenizer.decode(self._ids)
        certain = text[len(self._given) : len(text) - unknown]
        self._given += certain
        if not unknown:
            self._ids = self._ids[self._boundary :]
            self._boundary = len(self._ids)
            self._given = self.tokenizer.decode(self._ids)
        return self._up_to_stop(certain)

    def end(self) -> str:
        """Text that was held back, when no more tokens come."""
        rest = self._up_to_stop(self.tokenizer.decode(self._ids)[len(self._given) :])
        held, self._held = self._held, ""
        return rest + held

    def _up_to_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self.stop if stop in text]
        if found:  # the one that is complete first, of several the longest
            self.stopped, self._held = True, ""
            return text[: sum(min(found))]
        longest = max((_begun(text, stop) for stop in self.stop), default=0)
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
