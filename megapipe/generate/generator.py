"""Texts that a model writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from megapipe.errors import NumericError
from megapipe.generate.reading import CachedDecoder, Texts
from megapipe.generate.rereading import UncachedDecoder
from megapipe.generate.sampling import Sampling, sample_token
from megapipe.generate.text import TextStream
from megapipe.inference.model import Model

End = Literal["document", "turn", "stop", "tokens"]
"""Why a text ended: its document did, or the turn of a conversation; a stop string came up; or
enough tokens were added."""
_NOT_FINITE = -1
"""In the place of a token, where its logits are not finite."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to go on from, and those that end what follows."""

    ids: tuple[int, ...]
    turn_ends: frozenset[int] = frozenset()


class Piece(NamedTuple):
    """One more token, and the text that it adds."""

    prompt: int
    """Number of the prompt, from 0."""
    token: int
    """Id of the token."""
    text: str
    """Text that has become certain; may be empty."""
    end: End | None
    """Given with the last piece of a prompt."""


class Generator:
    """A model that writes. All ranks of the model make one, and ask it for the same texts."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokenizer = model.source.tokenizer

    def prompt(self, text: str) -> Prompt:
        """A text at the beginning of a document."""
        ids = map(int, self.tokenizer.encode(text))
        source = self.model.source
        return Prompt((*source.opening, *ids) or source.start)

    def read(self, texts: Sequence[Sequence[int]], *, room: int) -> Texts:
        """Begin to read texts, given as ids, to each of which up to `room` tokens will be added."""
        if not self.model.keeps:
            return UncachedDecoder(self.model, texts)
        return CachedDecoder(self.model, texts, room=room)

    def generate(
        self, prompts: Sequence[str | Prompt], sampling: Sampling, *, batch: int = 16
    ) -> Iterator[Piece]:
        """Continue each of `prompts`, `batch` of them side by side.

        What a prompt gets depends on its tokens, the seed, and how often the same were given before
        it; its neighbours and the layout change no more than the rounding of sums.

        Raises:
            NumericError: a logit is not finite.
        """
        known = [self.prompt(each) if isinstance(each, str) else each for each in prompts]
        given: Counter[Prompt] = Counter()
        for first in range(0, len(known), batch):
            texts = []
            for number, prompt in enumerate(known[first : first + batch], first):
                texts.append(_Text(self, number, prompt, sampling, given[prompt]))
                given[prompt] += 1
            yield from self._side_by_side(texts, sampling)

    def _side_by_side(self, texts: list[_Text], sampling: Sampling) -> Iterator[Piece]:
        reading = self.read([text.ids for text in texts], room=sampling.tokens)
        while texts:
            tokens = self._choose(texts, reading.logits())
            pieces = [text.extend(token) for text, token in zip(texts, tokens, strict=True)]
            yield from pieces
            reading.append([piece.token if piece.end is None else None for piece in pieces])
            texts = [text for text, piece in zip(texts, pieces, strict=True) if piece.end is None]

    def _choose(self, texts: Sequence[_Text], logits: Tensor | None) -> list[int]:
        """The next token of each text, on every rank, by the logits of the one that speaks."""
        own: list[int] | None = None
        if self.model.speaks:
            assert logits is not None
            rows = logits[:, : self.tokenizer.vocab_size].cpu()
            own = [text.choose(row) for text, row in zip(texts, rows, strict=True)]
        tokens = [int(token) for token in self.model.shared(own, len(texts))]
        if _NOT_FINITE in tokens:
            raise NumericError(
                "the model's logits are not finite: its weights are damaged or diverged"
            )
        return tokens


class _Text:
    """A prompt and what is chosen to follow it; `number` is the prompt's, `before` tells how often
    the same one was given before."""

    def __init__(
        self, generator: Generator, number: int, prompt: Prompt, sampling: Sampling, before: int
    ) -> None:
        self.number = number
        self.ids = prompt.ids
        self.sampling = sampling
        self._document_ends = generator.model.source.ends
        self._turn_ends = prompt.turn_ends
        self._left = sampling.tokens
        self._source = sampling.source(before)
        self._stream = TextStream(generator.tokenizer, sampling.stop)

    def choose(self, logits: Tensor) -> int:
        """The next token by its logits [V], or :data:`_NOT_FINITE`."""
        if not logits.isfinite().all():
            return _NOT_FINITE
        return sample_token(logits, self.sampling, self._source)

    def extend(self, token: int) -> Piece:
        """Add the token that was chosen."""
        if token in self._turn_ends:
            return Piece(self.number, token, self._stream.end(), "turn")
        if token in self._document_ends:
            return Piece(self.number, token, self._stream.end(), "document")
        self._left -= 1
        text = self._stream.add(token)
        if not self._left:
            text += self._stream.end()
        end: End | None = None if self._left else "tokens"
        return Piece(self.number, token, text, "stop" if self._stream.stopped else end)
