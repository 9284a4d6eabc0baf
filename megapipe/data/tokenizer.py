"""Text to token ids and back: bytes, or any Hugging Face tokenizer."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megapipe.data.hub import check_reachable, is_hub_name, one_line
from megapipe.errors import DataError

TokenIds = npt.NDArray[np.integer[Any]]

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Names of end marks; the first in the vocabulary is taken where a tokenizer declares no eos_token
or sep_token, as a bare tokenizer.json does not."""


class Tokenizer(Protocol):
    """The interface of a tokenizer, as far as the package uses it."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int:
        """The id that ends a document; no text encodes to it."""

    @property
    def digest(self) -> str:
        """Hex digest of all that decides which ids a text gets."""

    def encode(self, text: str) -> TokenIds:
        """Ids of a text [n], without marks at its ends."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode` of each text; may use several threads."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids; special tokens and incomplete characters do not make it fail."""


class ByteTokenizer:
    """The 256 bytes of UTF-8 and, as id 256, the end of a document."""

    vocab_size = 257
    eod = 256
    digest = hashlib.sha256(b"byte 257").hexdigest()

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`; special tokens spelled out in a text are plain text.

    Args:
        tokenizer: a ``transformers.PreTrainedTokenizerBase``.
        name: how the user called it, for messages.

    Raises:
        DataError: the tokenizer has no token that ends a document.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        vocab: dict[str, int] = tokenizer.get_vocab()
        self.tokenizer = tokenizer
        self.vocab_size = max(vocab.values()) + 1
        self.eod = _end_of_document(tokenizer, vocab, name)
        self.digest = _digest(tokenizer, vocab, self.eod)

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    ``byte``, a tokenizer.json, a folder that `transformers` can load, or a name on the Hugging
    Face hub (a local copy is used where there is one). Code that comes with a tokenizer is never
    run.

    Raises:
        DataError: it does not exist, cannot be loaded, or has no end-of-document token.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists() and not is_hub_name(name, (".json", ".model")):
        raise DataError(f"tokenizer {name!r}: no such file or folder (from {Path.cwd()})")

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def auto(source: str, *, local: bool) -> Any:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=local
        )

    try:
        if path.is_file():
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(path))
        elif path.exists():
            loaded = auto(str(path), local=True)
        else:
            try:
                loaded = auto(name, local=True)
            except OSError:  # no local copy
                check_reachable("tokenizer", name, "model")
                loaded = auto(name, local=False)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"tokenizer {name!r}: cannot be loaded ({one_line(error)})") from error
    return HuggingFaceTokenizer(loaded, name)


def _end_of_document(tokenizer: Any, vocab: dict[str, int], name: str) -> int:
    for declared in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if declared is not None:
            return int(declared)
    for token in END_TOKENS:
        if token in vocab:
            return vocab[token]
    raise DataError(
        f"tokenizer {name!r}: no end-of-document token; it needs an eos_token or sep_token, or one "
        f"of {', '.join(END_TOKENS)} in its vocabulary"
    )


def _digest(tokenizer: Any, vocab: dict[str, int], eod: int) -> str:
    state = hashlib.sha256(f"{type(tokenizer).__name__} {eod}".encode())
    if tokenizer.is_fast:
        state.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        state.update(json.dumps(sorted(vocab.items())).encode())
        with tempfile.TemporaryDirectory() as folder:
            for file in sorted(tokenizer.save_vocabulary(folder)):
                state.update(Path(file).read_bytes())
    return state.hexdigest()
