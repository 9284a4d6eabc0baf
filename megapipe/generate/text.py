"""Incremental detokenization: characters from tokens that arrive one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.data.tokenizer import Tokenizer

UNKNOWN = "\ufffd"
"""Character to which a tokenizer decodes invalid or incomplete bytes."""
MOST_UNKNOWN = 3
"""Maximum number of unknown characters at a text's end that later tokens may still complete."""


class TextStream:
    """Returns text as soon as it is certain: whole characters that cannot begin a stop string.

    `stopped`: whether a stop string occurred. The stop string and all text after it are not
    returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self._held = ""
        """Text held back because a stop string may begin there."""
        self._ids: list[int] = []
        """Tokens since the second-latest boundary; earlier tokens have no influence on the text. A
        boundary is the end of a token at which no character was incomplete."""
        self._boundary = 0
        """Number of `_ids` before the latest boundary."""
        self._certain = ""
        """Part of the text of `_ids` that is certain and has been returned or held back."""

    def add(self, token: int) -> str:
        """Add a token, and return the text that has become certain."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids)
        unknown = min(len(text) - len(text.rstrip(UNKNOWN)), MOST_UNKNOWN)
        if not text.startswith(self._certain):  # some decoders decode successive bytes as a whole
            if unknown and len(self._ids) - self._boundary <= MOST_UNKNOWN:
                return ""
            self._ids, self._boundary, self._certain = self._ids[self._boundary :], 0, ""
            text = self.tokenizer.decode(self._ids)
        certain = text[len(self._certain) : len(text) - unknown]
        self._certain += certain
        if not unknown:
            self._ids = self._ids[self._boundary :]
            self._boundary = len(self._ids)
            self._certain = self.tokenizer.decode(self._ids)
        return self._up_to_stop(certain)

    def end(self) -> str:
        """Return the text that was held back, once no more tokens come."""
        rest = self._up_to_stop(self.tokenizer.decode(self._ids)[len(self._certain) :])
        held, self._held = self._held, ""
        return rest + held

    def _up_to_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self.stop if stop in text]
        if found:  # take the stop string that is completed first; of several, the longest
            self.stopped, self._held = True, ""
            return text[: sum(min(found))]
        longest = max((_begun(text, stop) for stop in self.stop), default=0)
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a beginning of `stop`."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
