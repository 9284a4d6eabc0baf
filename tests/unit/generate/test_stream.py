"""Text of tokens that come one by one, against that of all tokens at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models

from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.data.tokenizer.hugging_face import FastTokenizer
from megapipe.generate.text import TextStream

BYTES = load_tokenizer("byte")


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama's: a space before the first word, rare characters as bytes."""
    pieces = ["</s>", "<unk>", "\u2581a", "\u2581b", "a", "b", "\u2581"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True
    )
    tokens = Tokens(model)
    tokens.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return FastTokenizer(tokens, "sp")


SENTENCEPIECE = sentencepiece()


def streamed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, stop)
    parts = []
    for token in ids:
        parts.append(stream.add(token))
        if stream.stopped:
            return parts
    return [*parts, stream.end()]


CHARACTERS = "ab é€😀"
TEXT = st.text(st.sampled_from(CHARACTERS), max_size=12)


@settings(max_examples=60)
@given(st.text(st.sampled_from(CHARACTERS + "\ufffd"), max_size=12))
def test_characters_are_handed_on_whole_and_at_once(text: str) -> None:
    parts = streamed(BYTES, [int(i) for i in BYTES.encode(text)])
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert [part for part in parts if part] == list(text)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_are_not_lost(ids: list[int]) -> None:
    parts = streamed(BYTES, ids)
    assert "".join(parts) == BYTES.decode(ids)
    for seen in range(len(ids)):
        certain = "".join(parts[: seen + 1])
        assert len(BYTES.decode(ids[: seen + 1])) - len(certain) <= 3


@settings(max_examples=60)
@given(TEXT, st.integers(0, 3))
def test_a_leading_space_belongs_to_the_first_word_alone(text: str, spaces: int) -> None:
    ids = []
    for character in " " * spaces + text:
        if character in "ab ":
            ids.append({"a": 4, "b": 5, " ": 6}[character])
        else:
            ids += [7 + byte for byte in character.encode()]
    assert "".join(streamed(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids)


def test_a_byte_that_is_no_character_takes_nothing_with_it() -> None:
    ids = [4, *(7 + byte for byte in b"\xc3\xa9\xff"), 5]
    assert "".join(streamed(SENTENCEPIECE, ids)) == "aé\ufffdb"


@settings(max_examples=60)
@given(
    st.text(st.sampled_from("ab"), max_size=14),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_the_text_where_it_is_complete_first(text: str, stop: list[str]) -> None:
    ends = [
        (n, -len(each)) for n in range(len(text) + 1) for each in stop if text[:n].endswith(each)
    ]
    expected = text if not ends else text[: sum(min(ends))]
    parts = streamed(BYTES, [int(i) for i in BYTES.encode(text)], tuple(stop))
    assert "".join(parts) == expected
    if ends:
        assert len(parts) == min(ends)[0], "at once"


def test_nothing_is_held_back_without_need() -> None:
    parts = streamed(BYTES, [int(i) for i in BYTES.encode("one twenty")], ("two",))
    assert parts == ["o", "n", "e", " ", "", "", "twe", "n", "", "ty", ""]
