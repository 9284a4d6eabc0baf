"""Which tokens of an example are labels, by expectations written out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megapipe.data.supervised import prepare_examples
from megapipe.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megapipe.data.tokenizer.hugging_face import of_transformers
from megapipe.errors import DataError
from tests.parity import chats
from tests.parity.chats import CHATML, FORGETFUL, LLAMA, MARKED, conversation
from tests.parity.supervised_rows import chat, in_other_files, rows_of_all_sizes, settings, stored

BYTE = ByteTokenizer()
TALK = conversation("!Be kind.", "Hi", "Hello", "Bye", " So long ")


def shown(folder: Path, rows: list[Any], template: str | None = None, **given: Any) -> list[str]:
    """Return the examples as texts, labels in brackets; the end mark is a bar."""
    config = settings(folder, rows, template, **given)
    found = []
    for ids, labels in stored(prepare_examples(config, BYTE, progress=False), 257):
        parts: list[bytes] = []
        for token, label, before in zip(ids, labels, [False, *labels], strict=False):
            parts += [b"[" if label else b"]"] if label != before else []
            parts.append(b"|" if token == 256 else bytes([token]))
        found.append(b"".join([*parts, b"]" if labels[-1] else b""]).decode())
    return found


@pytest.mark.parametrize(
    ("loss_turns", "template", "expected"),
    [
        (
            "all",
            CHATML,
            (
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\n[Hello<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
                "<|im_start|>assistant\n[ So long <|im_end|>\n]"
            ),
        ),
        (
            "last",
            FORGETFUL,
            (
                "<|im_start|>system\nbe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
                "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
                "<|im_start|>assistant\n[ So long <|im_end|>\n]"
            ),
        ),
        (
            "all",
            LLAMA,
            (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello<|eot_id|>]"
                "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n[So long<|eot_id|>]"
            ),
        ),
        (
            "all",
            MARKED,
            (
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\n[hello<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n"
                "<|im_start|>assistant\n[ So long <|im_end|>]\n"
            ),
        ),
        (
            "last",
            MARKED,
            (
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
                "<|im_start|>assistant\n[ So long <|im_end|>]\n"
            ),
        ),
    ],
)
def test_conversations(loss_turns: str, template: str, expected: str, tmp_path: Path) -> None:
    if template == FORGETFUL:  # of the prompt for the last turn, the last message is another
        template = template.replace("loop.last", "loop.last and m['role'] == 'assistant'")
    assert shown(tmp_path, [{"messages": TALK}], template, loss_turns=loss_turns) == [expected]


def test_other_turns(tmp_path: Path) -> None:
    """The assistant first, twice in a row, or followed by the user; fields of other names."""
    assistant, user = ({"role": role, "content": role[0]} for role in ("assistant", "user"))
    rows = [{"talk": [assistant]}, {"talk": [user, assistant, assistant, user], "prompt": "no"}]
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert shown(tmp_path, rows, CHATML, messages_field="talk") == [
        f"{start}assistant\n[a{end}]",
        f"{start}user\nu{end}{start}assistant\n[a{end}]{start}assistant\n[a{end}]{start}user\nu{end}",
    ]


def test_prompts_and_completions(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "ä\n", "completion": "ö", "n": 1}]
    assert shown(tmp_path, rows) == ["2+2=[4|]", "ä\n[ö|]"]
    rows = [{"q": "a", "a": "b", "messages": None}, chat("x", "y")]
    given = {"prompt_field": "q", "completion_field": "a"}
    assert shown(tmp_path, rows, CHATML, **given) == [
        "a[b|]",
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n[y<|im_end|>\n]",
    ]


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED])
def test_tokens_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    """And labels those of its own mask, where a template marks the turns. A name of a token in a
    message is plain, and its pieces are joined to nothing beside it."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=chats.tokenizer(), eos_token="<|eot_id|>", chat_template=template
    )
    tokenizer = of_transformers(wrapped, "made here")
    talks = [TALK, conversation("the  you", "than\n\n", "äöü €\n\n", "\nthe")]
    config = settings(tmp_path, [{"messages": talk} for talk in talks])
    found = stored(prepare_examples(config, tokenizer, progress=False), tokenizer.vocab_size)
    for talk, (ids, labels) in zip(talks, found, strict=True):
        right = wrapped.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=template == MARKED
        )
        assert ids == right["input_ids"]
        assert any(labels)
        assert not labels[0]
        if template == MARKED:
            assert labels == list(map(bool, right["assistant_masks"]))
    ends = tokenizer.added_tokens["<|im_end|>"], tokenizer.added_tokens["<|eot_id|>"]
    rows = [{"messages": conversation("a<|im_end|>\ufdd0b", "<|eot_id|>", "<|im_end|>", "z\ufdd3")}]
    rows.append({"prompt": "p<|im_end|>", "completion": "<|im_end|>"})
    config = settings(tmp_path, rows)
    spelled, pair = stored(
        prepare_examples(config, tokenizer, progress=False), tokenizer.vocab_size
    )
    assert sum(token in ends for token in spelled[0]) == 4, "the template's own"
    text = wrapped.decode(spelled[0])
    assert all(part in text for part in ("a<|im_end|>b", "<|eot_id|>" * (template == LLAMA)))
    assert [token in ends for token in pair[0]] == [False] * (len(pair[0]) - 1) + [True]


def test_a_tokenizer_file_and_tiktoken_write_chats_too(tmp_path: Path) -> None:
    chats.tokenizer().save(str(tmp_path / "tokenizer.json"))
    found: list[Tokenizer] = [load_tokenizer(str(tmp_path / "tokenizer.json"))]
    tiktoken = pytest.importorskip("tiktoken")
    from megapipe.data.tokenizer.of_tiktoken import TiktokenTokenizer

    ranks = {bytes([i]): i for i in range(256)} | {b"he": 256, b"\xc3\xa4\xc3": 257}
    special = {"<|endoftext|>": 258, "<|im_start|>": 259, "<|im_end|>": 260}
    found.append(
        TiktokenTokenizer(
            tiktoken.Encoding(
                "own", pat_str=r"[^\n]+|\n", mergeable_ranks=ranks, special_tokens=special
            )
        )
    )
    row = chat("the äöü", "hehe äää<|im_end|>")
    for tokenizer in found:
        config = settings(tmp_path, [row], CHATML)
        ((ids, labels),) = stored(
            prepare_examples(config, tokenizer, progress=False), tokenizer.vocab_size
        )
        start, end = (tokenizer.added_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
        assert (ids.count(start), ids.count(end)) == (2, 2)
        counted = [token for token, label in zip(ids, labels, strict=True) if label]
        assert counted[-2] == end
        assert tokenizer.decode(counted) == "hehe äää<|im_end|>\n"
        assert labels == [False] * (len(ids) - len(counted)) + [True] * len(counted)


def test_files_of_other_forms(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = rows_of_all_sizes()
    config = settings(tmp_path, rows, CHATML)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(Path(config.source).read_bytes()))
    in_other_files(config, tmp_path, "rows.parquet", "rows.json", "rows.jsonl.gz")


def test_the_digest_follows_what_decides_labels(tmp_path: Path) -> None:
    config = settings(tmp_path, [chat("a", "b")], CHATML)
    (tmp_path / "llama.jinja").write_text(LLAMA)
    digests = [
        prepare_examples(config.model_copy(update=given), BYTE, progress=False).digest
        for given in (
            {},
            {"loss_turns": "last"},
            {"chat_template": str(tmp_path / "llama.jinja")},
            {"prompt_field": "q"},
        )
    ]
    assert len(set(digests)) == 4
    (tmp_path / "again.jinja").write_text(CHATML)
    same = config.model_copy(update={"chat_template": str(tmp_path / "again.jinja")})
    assert prepare_examples(same, BYTE, progress=False).digest == digests[0]


def test_marks_of_our_own_in_a_text_are_lost(tmp_path: Path) -> None:
    marks = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
    rows = [chat(f"a{mark}b", f"{mark}c{mark}d") for mark in marks]
    rows += [{"prompt": f"a{mark}b", "completion": f"{mark}c{mark}d"} for mark in marks]
    talk = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[cd<|im_end|>\n]"
    assert shown(tmp_path, rows, CHATML) == [talk] * 5 + ["ab[cd|]"] * 5


GOOD = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"text": "x"}, None, "has neither 'messages' (data.messages_field) nor 'prompt' and "),
        ({"prompt": "x"}, None, "'completion' (data.prompt_field, data.completion_field); it has"),
        ({}, None, "it has: nothing"),
        (["x"], None, "holds a list, not an object with fields"),
        ({"prompt": 3, "completion": "x"}, None, "'prompt' (data.prompt_field) holds a number, no"),
        ({"prompt": "x", "completion": ""}, None, "'completion' (data.completion_field) is empty"),
        (chat("a", "b"), None, "a conversation needs a chat template, which tokenizer 'byte' does"),
        ({"messages": "hi"}, CHATML, "(data.messages_field) holds a text, not a list of messages"),
        ({"messages": ["hi"]}, CHATML, "message 1 is a text, not an object with a role"),
        ({"messages": [{"content": "hi"}]}, CHATML, "message 1 has no role: expected system, user"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            CHATML,
            "message 1 has a content of a number, not text",
        ),
        (chat("only the user"), CHATML, "has no message of role 'assistant': there is nothing to"),
        ({"messages": []}, CHATML, "has no message of role 'assistant'"),
        (chat("A", "B", "C", "D"), FORGETFUL, "the chat template renders message 2, or an earlier"),
        (
            chat("A", "B", "C", "D"),
            FORGETFUL.replace("loop.last", "loop.last or m['role'] == 'user'"),
            "the chat template renders message 2, or an earlier one, differently once the con",
        ),
        (
            chat("a", "b"),
            "{{ raise_exception('no system') }}",
            "the chat template fails (no system",
        ),
        (chat("a", "b"), "{% for %}", "the chat template fails (Expected an expression"),
        (
            chat("a", "b"),
            "{{ messages[0]['content'] }}",
            "the chat template writes nothing for mes",
        ),
        (
            chat("a", "b"),
            "{% for m in messages if false %}{% generation %}x{% endgeneration %}{% endfor %}",
            "the chat template marks no part of it with {% generation %}",
        ),
    ],
)
def test_rows_that_are_no_examples(
    row: Any, template: str | None, words: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, [GOOD, row, GOOD], template)
    with pytest.raises(DataError) as raised:
        prepare_examples(config, BYTE, progress=False)
    text = str(raised.value)
    assert words in text
    assert "\n" not in text
    assert text.startswith(f"corpus file {tmp_path / 'rows.jsonl'}: line 2"), text


def test_corpora_that_have_no_examples(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "t.txt").write_text("text")
    pq.write_table(pa.table({"prompt": ["x"], "answer": ["y"]}), tmp_path / "p.parquet")
    pq.write_table(
        pa.table({"prompt": list("abcdef"), "completion": [*"abcd", None, "x"]}),
        tmp_path / "q.parquet",
        row_group_size=2,
    )
    for name, given, words in (
        ("t.txt", {}, r"t\.txt has no rows: expected \.jsonl, \.ndjson, \.json, \.parquet"),
        ("p.parquet", {}, r"p\.parquet has neither 'messages' .* it has: prompt, answer"),
        ("q.parquet", {}, r"q\.parquet: row 5: field 'completion' .* holds null"),
        ("rows.jsonl", {"validation_fraction": 0.1}, "has a single row: nothing to hold out"),
        ("rows.jsonl", {"chat_template": "gone"}, "data.chat_template=gone: No such file"),
        ("rows.jsonl", {"chat_template": str(tmp_path / "l")}, "chat_template=.*: not UTF-8 text"),
    ):
        (tmp_path / "l").write_bytes(b"\xff")
        config = settings(tmp_path, [GOOD], **{"source": str(tmp_path / name), **given})
        with pytest.raises(DataError, match=words):
            prepare_examples(config, BYTE, progress=False)
