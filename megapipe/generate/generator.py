"""A checkpoint's model, and the texts that it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.data_config import DataConfig
from megapipe.distributed.mesh import Axis
from megapipe.errors import ConfigError
from megapipe.generate.reading import Reading, Texts
from megapipe.generate.rereading import Rereading
from megapipe.generate.sampling import Sampling, choose
from megapipe.generate.text import TextStream
from megapipe.layers.parameter import TORCH_DTYPES, Sharding, spec_of
from megapipe.layout.family import make_family
from megapipe.model.interface import Conditions
from megapipe.optim.buffers import owned_parameters

End = Literal["document", "stop", "tokens"]
"""Why a text ended: its document did, a stop string came up, or enough tokens were added."""


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
    """A whole model on one device, for sampling."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        stored = checkpoint.manifest.config
        self.config = stored_model(stored)
        self.device = device
        self.tokenizer: Tokenizer = load_tokenizer(str(stored["data.tokenizer"]))
        if self.config.vocab_size is None or self.tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"tokenizer {stored['data.tokenizer']} has {self.tokenizer.vocab_size} ids, the "
                f"checkpoint's model {self.config.vocab_size}"
            )
        length = stored["train.sequence_length"]
        assert isinstance(length, int)
        self.context = length
        """Most tokens that the model sees at a time: the length that it was trained at."""
        keys = ("samples", "document_mask", "reset_positions")
        known = {key: stored[f"data.{key}"] for key in keys if f"data.{key}" in stored}
        data = DataConfig.model_validate(known)
        self.document_end = self.tokenizer.eod if data.masks_documents else None
        self.resets_positions = self.config.positions == "learned" and data.resets_positions
        sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[self.config.dtype])
        family = make_family(self.config, Conditions(length, microbatch=1))
        self.module = family.build(family.whole, sharding)
        self.module.train(False)
        self._fill(checkpoint)
        self.module.to(device)
        self.keeps = "kv_cache" in family.supports
        """The model can go on from keys and values that it has kept."""

    def _fill(self, checkpoint: Checkpoint) -> None:
        """Give every parameter its weights; the two uses of a tied embedding share one tensor."""
        tensors: dict[str, Tensor] = {}
        for owned in owned_parameters(self.module):
            spec = spec_of(owned.parameter)
            if spec.name not in tensors:
                values = torch.zeros(spec.sizes, dtype=owned.parameter.dtype, device=self.device)
                whole = checkpoint.read(f"model/{spec.name}")
                values[tuple(slice(n) for n in spec.shape)] = whole.to(values)
                tensors[spec.name] = values
            owned.replace(Parameter(tensors[spec.name], requires_grad=False))

    def ids(self, prompt: str) -> list[int]:
        """A prompt's tokens, at the beginning of a document."""
        return [self.tokenizer.eod, *map(int, self.tokenizer.encode(prompt))]

    def read(self, texts: Sequence[Sequence[int]], *, room: int) -> Texts:
        """Begin to read texts, given as ids, to each of which up to `room` tokens will be added."""
        if not self.keeps:
            return Rereading(self.module, texts, context=self.context, device=self.device)
        return Reading(
            self.module,
            texts,
            context=self.context,
            room=room,
            device=self.device,
            document_end=self.document_end,
            resets_positions=self.resets_positions,
        )

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, *, batch: int = 16
    ) -> Iterator[Piece]:
        """Continue each of `prompts`, `batch` of them side by side.

        What a prompt gets depends on its text, the seed, and how often the same text was given
        before it; its neighbours change no more than the rounding of sums.

        Raises:
            NumericError: a logit is not finite.
        """
        given: Counter[str] = Counter()
        for first in range(0, len(prompts), batch):
            texts = []
            for number, prompt in enumerate(prompts[first : first + batch], first):
                texts.append(_Text(self, number, prompt, sampling, given[prompt]))
                given[prompt] += 1
            yield from self._side_by_side(texts, sampling)

    def _side_by_side(self, texts: list[_Text], sampling: Sampling) -> Iterator[Piece]:
        reading = self.read([text.ids for text in texts], room=sampling.tokens)
        while texts:
            logits = reading.logits()[:, : self.tokenizer.vocab_size].cpu()
            pieces = [text.extend(row) for text, row in zip(texts, logits, strict=True)]
            yield from pieces
            reading.append([piece.token if piece.end is None else None for piece in pieces])
            texts = [text for text, piece in zip(texts, pieces, strict=True) if piece.end is None]


class _Text:
    """A prompt and what is chosen to follow it; `number` is the prompt's, `before` tells how often
    the same one was given before."""

    def __init__(
        self, generator: Generator, number: int, prompt: str, sampling: Sampling, before: int
    ) -> None:
        self.number = number
        self.ids = generator.ids(prompt)
        self.sampling = sampling
        self._document_end = generator.tokenizer.eod
        self._left = sampling.tokens
        self._source = sampling.source(before)
        self._stream = TextStream(generator.tokenizer, sampling.stop)

    def extend(self, logits: Tensor) -> Piece:
        """Choose the next token by its logits [V]."""
        token = choose(logits, self.sampling, self._source)
        if token == self._document_end:
            return Piece(self.number, token, self._stream.end(), "document")
        self._left -= 1
        text = self._stream.add(token)
        if not self._left:
            text += self._stream.end()
        end: End | None = None if self._left else "tokens"
        return Piece(self.number, token, text, "stop" if self._stream.stopped else end)
