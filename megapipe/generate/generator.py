"""Text generation: a model, its prompts, and the tokens that continue them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from megapipe.errors import NumericError
from megapipe.generate.cached_decoder import CachedDecoder, Texts
from megapipe.generate.sampling import Sampling, sample_token
from megapipe.generate.text import TextStream
from megapipe.generate.uncached_decoder import UncachedDecoder
from megapipe.inference.model import Model

End = Literal["document", "turn", "stop", "tokens"]
"""Why a text ended. document: its document ended; turn: the turn of a conversation ended; stop: a
stop string occurred; tokens: it has the requested number of tokens."""
_NOT_FINITE = -1
"""Number that replaces a token id if the logits are not finite."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the tokens that end the continuation."""

    ids: tuple[int, ...]
    turn_ends: frozenset[int] = frozenset()


class TokenOutput(NamedTuple):
    """One generated token, and the text that it completes."""

    prompt: int
    """Index of the prompt, from 0."""
    token: int
    """Id of the token."""
    text: str
    """Text that this token completes. It is empty while a character is incomplete or a stop string
    could follow."""
    end: End | None
    """Why the text ended; None unless this is the last token of its prompt's text."""


class Generator:
    """A model that generates text. Collective: all ranks of the model pass the same texts."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokenizer = model.source.tokenizer

    def prompt(self, text: str) -> Prompt:
        """Tokenize a text as the beginning of a document."""
        ids = map(int, self.tokenizer.encode(text))
        source = self.model.source
        return Prompt((*source.opening, *ids) or source.start)

    def read(self, texts: Sequence[Sequence[int]], *, room: int) -> Texts:
        """Start to read `texts`, token ids. At most `room` tokens will be appended to each text."""
        if not self.model.keeps:
            return UncachedDecoder(self.model, texts)
        return CachedDecoder(self.model, texts, room=room)

    def generate(
        self, prompts: Sequence[str | Prompt], sampling: Sampling, *, batch: int = 16
    ) -> Iterator[TokenOutput]:
        """Continue each of `prompts`, in batches of `batch` prompts.

        The text for a prompt depends on the prompt's tokens, the seed, and the number of equal
        prompts before this one. Other prompts and the layout only change how sums are rounded.

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

    def _side_by_side(self, texts: list[_Text], sampling: Sampling) -> Iterator[TokenOutput]:
        reading = self.read([text.ids for text in texts], room=sampling.tokens)
        while texts:
            tokens = self._choose(texts, reading.logits())
            pieces = [text.extend(token) for text, token in zip(texts, tokens, strict=True)]
            yield from pieces
            reading.append([piece.token if piece.end is None else None for piece in pieces])
            texts = [text for text, piece in zip(texts, pieces, strict=True) if piece.end is None]

    def _choose(self, texts: Sequence[_Text], logits: Tensor | None) -> list[int]:
        """Choose the next tokens on the rank whose logits are used; return them on every rank."""
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
    """A prompt and its continuation. `number` is the index of the prompt, `before` the number of
    equal prompts before it."""

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
        """Choose the next token from logits [V]; :data:`_NOT_FINITE` if any is not finite."""
        if not logits.isfinite().all():
            return _NOT_FINITE
        return sample_token(logits, self.sampling, self._source)

    def extend(self, token: int) -> TokenOutput:
        """Append the chosen token. Return it with the text that it completes."""
        if token in self._turn_ends:
            return TokenOutput(self.number, token, self._stream.end(), "turn")
        if token in self._document_ends:
            return TokenOutput(self.number, token, self._stream.end(), "document")
        self._left -= 1
        text = self._stream.add(token)
        if not self._left:
            text += self._stream.end()
        end: End | None = None if self._left else "tokens"
        return TokenOutput(self.number, token, text, "stop" if self._stream.stopped else end)
