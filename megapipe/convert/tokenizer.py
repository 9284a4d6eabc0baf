"""Tokenizers as the files that `transformers.AutoTokenizer` reads."""

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
"""Texts in which what tokenizers do first differs: words, numbers, spaces, composed characters."""


def save_tokenizer(
    tokenizer: Tokenizer, name: str, folder: Path, most_tokens: int, *, opens: bool = False
) -> bool:
    """Write the files of the tokenizer that :func:`~megapipe.data.tokenizer.load_tokenizer` has
    made of `name`; of a model that reads `most_tokens`. With `opens` it puts the end of a document
    before a text, as ``generate`` does for a run. False: it has no files (tiktoken)."""
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
        # its name in transformers 4, which version 5 knows too
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(f"{json.dumps(settings, indent=2, sort_keys=True)}\n", encoding="utf-8")
    return True


def same_ids(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether ``AutoTokenizer`` gives some texts the same ids by the files in `folder`.

    For some model types it takes a class of its own whatever the files say, as transformers 5 does
    for qwen2: with the words of that family's tokenizer, and composed characters.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return all(
        theirs(text, add_special_tokens=False, verbose=False).input_ids
        == tokenizer.encode(text).tolist()
        for text in SAMPLES
    )


def opens_documents(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether ``AutoTokenizer`` puts the end of a document, and nothing else, before and behind a
    text by the files in `folder`."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    bare = theirs("a", add_special_tokens=False).input_ids
    return bool(theirs("a").input_ids == [tokenizer.eod, *bare])


def _open_documents(backend: Any, eod: int) -> None:
    """Have a ``tokenizers.Tokenizer`` put the token `eod` before each text, in the place of the
    tokens that it puts anywhere else."""
    from tokenizers import processors

    mark = backend.id_to_token(eod)
    opening: Any = processors.TemplateProcessing(
        single=[mark, "$A"], pair=[mark, "$A", f"{mark}:1", "$B:1"], special_tokens=[(mark, eod)]
    )
    before = backend.post_processor
    if isinstance(before, processors.ByteLevel):  # which tells the places of tokens
        opening = processors.Sequence([before, opening])
    backend.post_processor = opening


def _of_transformers(tokenizer: Tokenizer, name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(tokenizer, ByteTokenizer):
        # split_special_tokens: an end mark that is spelled out in a text is text, as in a run
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
    )  # loaded before, so it is in the local copy of the hub


def byte_backend() -> Any:
    """A ``tokenizers.Tokenizer`` with the ids of :class:`ByteTokenizer`: 256 bytes, written as the
    characters that stand for them in byte-level BPE (Radford et al., 2019), no merges, and a mark
    that no text has."""
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
    """The character of each byte: itself if it can be seen in Latin-1, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
