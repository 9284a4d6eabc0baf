"""A model for EleutherAI's lm-evaluation-harness, which is loaded with this file alone.

The harness makes requests of texts and adds up the answers. Every rank makes the same requests, so
to the harness each is a world of its own. Texts begin as in :mod:`megapipe.generate`; exports begin
them alike, so that the harness' class for transformers gets the same of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from megapipe.errors import DataError
from megapipe.evaluate.choices import row_of
from megapipe.evaluate.scoring import scores
from megapipe.evaluate.windows import windows
from megapipe.generate.generator import Generator, Prompt
from megapipe.generate.sampling import Sampling
from megapipe.inference.model import Model

MOST_TOKENS = 256
"""Tokens of a generated text where the task does not say; the harness' own default."""


class HarnessModel(TemplateLM):
    """Answers the harness' requests by `model`, `batch` of them side by side."""

    def __init__(self, model: Model, *, batch: int = 8) -> None:
        super().__init__()
        self._model = model
        self._batch = batch
        self._encoder = model.source.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._encoder.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        return self._model.source.start[-1]

    @property
    def max_length(self) -> int:
        """Most tokens that the model sees."""
        return self._model.source.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text; special ones that it spells out are plain text."""
        opening = () if add_special_tokens is False else self._model.source.opening
        return [*opening, *map(int, self._encoder.encode(string))]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is the greedy one) of each continuation of a context."""
        return super().loglikelihood(list(requests), disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"a continuation of {len(continuation)} tokens ({texts[1][:40]!r}): expected 1 "
                    f"to {self.max_length}, the model's context"
                )
            start = () if context else (self.prefix_token_id,)
            rows.append(row_of(start, context, continuation, self.max_length)[0])
        found = scores(self._model, rows, batch=self._batch)
        return [(score.total, score.greedy) for score in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        """Log-likelihood of each text as a whole, in nats; each token is scored once."""
        most = self.max_length
        rows = [
            list(
                windows(
                    [self.prefix_token_id, *self.tok_encode(text)],
                    first=1,
                    context=most,
                    stride=most,
                )
            )
            for (text,) in (request.args for request in requests)
        ]
        found = scores(self._model, (row for some in rows for row in some), batch=self._batch)
        return [sum(next(found).total for _ in some) for some in rows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Texts that the model writes behind each context, up to one of those that end it."""
        texts = [""] * len(requests)
        alike: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_sampling(request.args[1]), []).append(number)
        generator = Generator(self._model)
        for sampling, numbers in alike.items():
            prompts = [self._prompt(requests[number].args[0]) for number in numbers]
            for piece in generator.generate(prompts, sampling, batch=self._batch):
                texts[numbers[piece.prompt]] += piece.text
        return texts

    def _prompt(self, context: str) -> Prompt:
        return Prompt(tuple(self.tok_encode(context) or [self.prefix_token_id]))


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """A task's ``generation_kwargs``, in the words of transformers."""
    until = given.get("until") or []
    draws = bool(given.get("do_sample", given.get("temperature", 0) > 0))
    return Sampling(
        tokens=int(given.get("max_gen_toks", MOST_TOKENS)),
        temperature=float(given.get("temperature", 1.0)) if draws else 0.0,
        top_k=given.get("top_k") if draws else None,
        top_p=given.get("top_p") if draws else None,
        stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
    )
