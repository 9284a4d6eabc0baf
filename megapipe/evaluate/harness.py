"""A model for EleutherAI's lm-evaluation-harness. Only this module imports the harness.

The harness sends texts as requests and aggregates the answers. Every rank runs the harness with the
same requests, so the harness sees a world of size 1 on each rank. Texts begin as in
:mod:`megapipe.generate`. Exported models begin texts in the same way, so the harness's own class
for transformers gets the same results for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from megapipe.errors import DataError
from megapipe.evaluate.multiple_choice import row_of
from megapipe.evaluate.scoring import scores
from megapipe.evaluate.windows import windows
from megapipe.generate.generator import Generator, Prompt
from megapipe.generate.sampling import Sampling
from megapipe.inference.model import Model

MOST_TOKENS = 256
"""Default number of tokens to generate if a task sets none; the harness has the same default."""


class HarnessModel(TemplateLM):
    """Answers the harness's requests with `model`, in batches of `batch` requests."""

    def __init__(self, model: Model, *, batch: int = 8) -> None:
        super().__init__()
        self._model = model
        self._batch = batch
        self._encoder = model.source.tokenizer

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-document token."""
        return self._encoder.eod

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that starts a text without context."""
        return self._model.source.start[-1]

    @property
    def max_length(self) -> int:
        """Largest number of tokens that the model sees at a time."""
        return self._model.source.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize a text. Names of special tokens in the text count as plain text."""
        opening = () if add_special_tokens is False else self._model.source.opening
        return [*opening, *map(int, self._encoder.encode(string))]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether it is the greedy one."""
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
        """Return the log-likelihood of each whole text, in nats. Each token is scored once."""
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
        """Return the generated text after each context, up to the first stop string."""
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
    """Convert a task's ``generation_kwargs``, which use transformers' names, to a Sampling."""
    until = given.get("until") or []
    draws = bool(given.get("do_sample", given.get("temperature", 0) > 0))
    return Sampling(
        tokens=int(given.get("max_gen_toks", MOST_TOKENS)),
        temperature=float(given.get("temperature", 1.0)) if draws else 0.0,
        top_k=given.get("top_k") if draws else None,
        top_p=given.get("top_p") if draws else None,
        stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
    )
