"""Tokenizers of `tokenizers` and `transformers`; special tokens spelled out in a text are plain
text."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.tokenizer.interface import Chat, TokenIds, TokenOffsets
from megapipe.errors import DataError
from megapipe.text import without_surrogates

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Names of EOS tokens. If a tokenizer declares no eos_token or sep_token (a bare tokenizer.json
cannot), the first of these names that is in the vocabulary is used."""

MOST_IDS = 2**24
"""Upper limit of ids, above any real vocabulary. `tokenizers` records every unused id below the
largest one, and without enough memory the process dies."""


class FastTokenizer:
    """A tokenizer of `tokenizers`.

    Args:
        backend: a ``tokenizers.Tokenizer`` that no other object uses.
        name: the tokenizer's name in the configuration, for messages.
        declared: candidates for the id of the EOS token; the first that is not None is used.
        chat: how the tokenizer renders conversations; default: no template, only its EOS token.

    Raises:
        DataError: the tokenizer has no EOS token.
    """

    def __init__(
        self,
        backend: Any,
        name: str,
        declared: Sequence[int | None] = (),
        chat: Chat | None = None,
    ) -> None:
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.backend = backend
        self.vocab_size = _size(vocab, name)
        self.eod = _end_of_document(declared, vocab, name)
        self.added_tokens, self.reserved = _added(backend.get_added_tokens_decoder())
        self.chat = chat or Chat(names={"eos_token": backend.id_to_token(self.eod)})
        backend.no_truncation()
        backend.no_padding()
        self.digest = hashlib.sha256(f"{self.eod} {backend.to_str()}".encode()).hexdigest()
        backend.encode_special_tokens = True
        opened = backend.encode("a")
        flagged = zip(opened.ids, opened.special_tokens_mask, strict=True)
        self.bos_tokens = tuple(
            token for token, is_special in takewhile(lambda pair: pair[1], flagged)
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.backend.encode_special_tokens = True  # lost when it was pickled

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        whole = list(map(without_surrogates, texts))
        encoded = self.backend.encode_batch_fast(whole, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def encode_rendered(self, text: str) -> TokenOffsets:
        self.backend.encode_special_tokens = False
        try:
            encoded = self.backend.encode(without_surrogates(text), add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = True
        starts, stops = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        return TokenOffsets(np.array(encoded.ids, dtype=np.int32), starts, stops)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text


class SlowTokenizer:
    """A tokenizer of `transformers` that is written in Python.

    Args:
        tokenizer: a ``transformers.PreTrainedTokenizerBase``.
        name: the tokenizer's name in the configuration, for messages.

    Raises:
        DataError: the tokenizer has no EOS token.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        vocab: dict[str, int] = tokenizer.get_vocab()
        self.tokenizer = tokenizer
        self.vocab_size = _size(vocab, name)
        self.eod = _end_of_document(_declared(tokenizer), vocab, name)
        self.name = name
        self.added_tokens, self.reserved = _added(tokenizer.added_tokens_decoder)
        self.chat = _chat(tokenizer)
        self.digest = _digest(tokenizer, vocab, self.eod)
        opened, bare = (tokenizer("a", add_special_tokens=each).input_ids for each in (True, False))
        self.bos_tokens: tuple[int, ...] = tuple(opened[: opened.index(bare[0])] if bare else ())

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encoded = self.tokenizer(
            list(map(without_surrogates, texts)),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def encode_rendered(self, text: str) -> TokenOffsets:
        raise DataError(
            f"tokenizer {self.name!r} is written in Python and does not report character "
            "offsets, which chats need: expected a tokenizer with a tokenizer.json"
        )

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def of_transformers(tokenizer: Any, name: str) -> FastTokenizer | SlowTokenizer:
    """Wrap a ``transformers.PreTrainedTokenizerBase``; `name`: its name in the configuration, for
    messages. Raises DataError if it has no EOS token."""
    if not tokenizer.is_fast:
        return SlowTokenizer(tokenizer, name)
    from tokenizers import Tokenizer

    _size(tokenizer.get_vocab(), name)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    return FastTokenizer(backend, name, _declared(tokenizer), _chat(tokenizer))


def _size(vocab: dict[str, int], name: str) -> int:
    """Return the size of a vocabulary: the largest id + 1. Raises DataError above MOST_IDS."""
    token = max(vocab, key=vocab.__getitem__, default=None)
    size = 0 if token is None else vocab[token] + 1
    if size > MOST_IDS:
        raise DataError(
            f"tokenizer {name!r}: token {token!r} has id {size - 1}: expected ids below {MOST_IDS}"
        )
    return size


def _added(tokens: dict[int, Any]) -> tuple[dict[str, int], frozenset[str]]:
    """Return the ids of added tokens by name, and the names of the special tokens among them."""
    special = frozenset(token.content for token in tokens.values() if token.special)
    return {token.content: number for number, token in sorted(tokens.items())}, special


def _chat(tokenizer: Any) -> Chat:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = tokenizer.special_tokens_map.items()
    return Chat(template, {key: str(name) for key, name in names if not isinstance(name, list)})


def _declared(tokenizer: Any) -> tuple[int | None, int | None]:
    return tokenizer.eos_token_id, tokenizer.sep_token_id


def _end_of_document(declared: Sequence[int | None], vocab: dict[str, int], name: str) -> int:
    for token_id in declared:
        if token_id is not None:
            return int(token_id)
    for token in END_TOKENS:
        if token in vocab:
            return vocab[token]
    raise DataError(
        f"tokenizer {name!r}: no end-of-document token; it needs an eos_token or sep_token, or one "
        f"of {', '.join(END_TOKENS)} in its vocabulary"
    )


def _digest(tokenizer: Any, vocab: dict[str, int], eod: int) -> str:
    state = hashlib.sha256(f"{type(tokenizer).__name__} {eod}".encode())
    state.update(json.dumps(sorted(vocab.items())).encode())
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(tokenizer.save_vocabulary(folder)):
            state.update(Path(file).read_bytes())
    return state.hexdigest()
