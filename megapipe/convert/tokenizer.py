"""Writes tokenizers as files that `transformers.AutoTokenizer` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megapipe.data.tokenizer import ByteTokenizer, Tokenizer
from megapipe.data.tokenizer.hugging_face import END_TOKENS, FastTokenizer, SlowTokenizer
from megapipe.util.paths import exists, is_file, user_path

END = END_TOKENS[0]
SAMPLES = (
    "It's 1999, isn't it?  x = [1, 22, 333]\t# 3.14\r\n\n  def f(a_b):\n    return -a_b ",
    "Größe: 5 €, naïve, e\u0301 \u1112\u1161\u11ab \u2126 \ufb01\u00a0;",
    "日本語のテキスト。русский текст, ελληνικά, עברית, हिन्दी, 🙂👩\u200d🚀",
)
"""Texts that tokenizers often encode differently: words, numbers, spaces, composed letters."""


def save_tokenizer(
    tokenizer: Tokenizer, name: str, folder: Path, most_tokens: int, *, opens: bool = False
) -> bool:
    """Write the files of a tokenizer to `folder`; return False for tiktoken, which has no files.

    `name` is the name that :func:`~megapipe.data.tokenizer.load_tokenizer` got, `most_tokens` the
    model's maximum sequence length. With `opens` the saved tokenizer prepends the EOS token to a
    text, as ``generate`` does.
    """
    found = _of_transformers(tokenizer, name)
    if found is None:
        return False
    if opens and found.is_fast:
        _open_documents(found.backend_tokenizer, tokenizer.eod)
    if isinstance(tokenizer, ByteTokenizer):
        found.model_max_length = most_tokens
    found.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        # its name in transformers 4, which version 5 accepts too
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(f"{json.dumps(settings, indent=2, sort_keys=True)}\n", encoding="utf-8")
    return True


def same_ids(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether ``AutoTokenizer``, with the files in `folder`, encodes the texts :data:`SAMPLES` like
    `tokenizer`.

    For some model types ``AutoTokenizer`` ignores the files and uses the family's own tokenizer
    class. For qwen2, transformers 5 then splits words differently and normalizes Unicode.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return all(
        theirs(text, add_special_tokens=False, verbose=False).input_ids
        == tokenizer.encode(text).tolist()
        for text in SAMPLES
    )


def opens_documents(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether ``AutoTokenizer``, with the files in `folder`, puts the EOS token before a text, and
    no other token before or after it."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    bare = theirs("a", add_special_tokens=False).input_ids
    return bool(theirs("a").input_ids == [tokenizer.eod, *bare])


def _open_documents(backend: Any, eod: int) -> None:
    """Make a ``tokenizers.Tokenizer`` put the token `eod` before each text, and add no other
    token."""
    from tokenizers import processors

    eod_token = backend.id_to_token(eod)
    opening: Any = processors.TemplateProcessing(
        single=[eod_token, "$A"],
        pair=[eod_token, "$A", f"{eod_token}:1", "$B:1"],
        special_tokens=[(eod_token, eod)],
    )
    before = backend.post_processor
    if isinstance(before, processors.ByteLevel):  # it computes the offsets of tokens
        opening = processors.Sequence([before, opening])
    backend.post_processor = opening


def _of_transformers(tokenizer: Tokenizer, name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(tokenizer, ByteTokenizer):
        # split_special_tokens: an end mark spelled out in a text is text, like in a run
        return PreTrainedTokenizerFast(
            tokenizer_object=byte_backend(),
            eos_token=END,
            bos_token=END,
            clean_up_tokenization_spaces=False,
            split_special_tokens=True,
        )
    if isinstance(tokenizer, SlowTokenizer):
        return tokenizer.tokenizer
    if not isinstance(tokenizer, FastTokenizer):
        return None
    path = user_path(name)
    if is_file(path):
        end = tokenizer.backend.id_to_token(tokenizer.eod)
        return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=end)
    source = str(path) if exists(path) else name
    return AutoTokenizer.from_pretrained(
        source, trust_remote_code=False, local_files_only=True
    )  # it has been loaded before, so it is in the local hub cache


def byte_backend() -> Any:
    """Return a ``tokenizers.Tokenizer`` with the ids of :class:`ByteTokenizer`: no merges, 256
    bytes in the characters of byte-level BPE (Radford et al., 2019), and an EOS token that no text
    contains."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary[END] = ByteTokenizer.eod
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return backend


def byte_characters() -> list[str]:
    """Return each byte's character in byte-level BPE: itself if visible in Latin-1, else one from
    U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
