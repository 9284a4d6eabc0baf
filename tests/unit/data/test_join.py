"""Token files joined and divided, as the commands do, and as a reader that knows no megapipe sees
them."""

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.commands import main
from megapipe.data.commands.split import boundaries
from megapipe.data.tokens import TokenFile, TokenWriter, join, writer
from tests.unit.data.data_cases import TEXTS, Documents, by_hand, index_bytes, write_documents


def read(prefix: Path) -> tuple[str, Documents]:
    """Read a token file by the table of the format alone."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    code, sequences, boundaries_ = struct.unpack_from("<BQQ", index, 17)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    offsets = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{boundaries_}q", index, 34 + 12 * sequences)
    kind = {8: "<u2", 4: "<i4", 5: "<i8"}[code]
    content = prefix.with_name(prefix.name + ".bin").read_bytes()
    found = [
        np.frombuffer(content, kind, length, offset).tolist()
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return kind, [found[first:last] for first, last in pairwise(documents)]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=4), max_size=3), max_size=6)


@settings(max_examples=80)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_the_chosen_documents_of_all_files(
    tmp_path_factory: pytest.TempPathFactory, files: list[Documents], size: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("join")
    whole = [document for documents in files for document in documents]
    taken = data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "AT_ONCE", size)
        patch.setattr(writer, "PIECE", size)
        prefixes = [
            write_documents(folder / str(i), documents) for i, documents in enumerate(files)
        ]
        with TokenWriter(folder / "all", np.dtype("<i4")) as file:
            join.join(prefixes, file, lambda first, last: np.array(taken[first:last], bool))
    expected = [document for document, is_taken in zip(whole, taken, strict=True) if is_taken]
    assert read(folder / "all") == ("<i4", expected)
    assert (file.documents, file.sequences) == (len(expected), sum(map(len, expected)))
    TokenFile(folder / "all")


def test_merge_and_split_are_each_other_s_inverse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents: Documents = [[[i] * 5, [i]] if i % 3 else [[i] * 7] for i in range(100)]
    write_documents(tmp_path / "x", documents)
    a, b, c = (tmp_path / name for name in "abc")
    assert main(["split", str(tmp_path / "x"), f"{a}=90", f"{b}=7.5", f"{c}=2.5"]) == 0
    assert [len(read(name)[1]) for name in (a, b, c)] == [90, 8, 2]
    out = str(tmp_path / "deep" / "again.bin")
    assert main(["merge", out, f"{a}.idx", f"{b}.bin", str(c)]) == 0
    for suffix in (".bin", ".idx"):
        again = (tmp_path / "deep" / f"again{suffix}").read_bytes()
        assert again == (tmp_path / f"x{suffix}").read_bytes()
    assert "again: 100 documents, 634 tokens, uint16" in capsys.readouterr().out
    assert len(list((tmp_path / "deep").iterdir())) == 2


def test_merge_of_other_types(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [[[1, 65535]]])
    write_documents(tmp_path / "b", [[[2, 70000]]], "<i4")
    assert main(["merge", str(tmp_path / "c"), str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert read(tmp_path / "c") == ("<i4", [[[1, 65535]], [[2, 70000]]])


@pytest.mark.parametrize(
    ("shares", "documents", "expected"),
    [
        ([969, 30, 1], 1000, [0, 969, 999, 1000]),
        ([1, 1, 1], 10, [0, 3, 7, 10]),
        ([0.1] * 10, 10, list(range(11))),
        ([5], 3, [0, 3]),
    ],
)
def test_shares(shares: list[float], documents: int, expected: list[int]) -> None:
    assert boundaries(shares, documents) == expected


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["hello", "x" * 100, ""]
    write_documents(tmp_path / "x", [[[*text.encode(), 256]] for text in texts])
    assert main(["inspect", str(tmp_path / "x"), "--tokenizer", "byte", "--documents", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'x.bin'}: uint16, 216 bytes",
        "3 documents in 3 sequences, 108 tokens",
        "tokens of a document: 1 to 101, 36.0 on average",
        "           1+            1 ##################################################",
        "           2+            0",
        "           4+            1 ##################################################",
        "           8+            0",
        "          16+            0",
        "          32+            0",
        "          64+            1 ##################################################",
        "document 0, 6 tokens: 'hello'",
        f"document 1, 101 tokens: '{'x' * 60}' ...",
        "document 2, 1 tokens: ''",
    ]
    assert main(["inspect", str(tmp_path / "x"), "--first", "2", "--documents", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "document 2, 1 tokens: 256"


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "x", [[[1, 2, 300]]])
    assert main(["verify", str(tmp_path / "x"), "--vocab-size", "301"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x'}: intact, 1 documents, 3 tokens\n"
    assert main(["verify", str(tmp_path / "x"), "--tokenizer", "byte"]) == 3
    assert "token id 300 at position 2 of" in capsys.readouterr().err


MISTAKES = [
    (["merge", "new", "x", "none"], 3, "token file none.idx: No such file"),
    (["merge", "y", "x"], 3, "y.bin exists: remove it or choose another name"),
    (["merge", "new", "x", "damaged"], 3, "damaged.idx: sequence 1 does not start where"),
    (["merge", "x.txt/new", "x"], 3, "x.txt"),
    (["merge", "new"], 2, "the following arguments are required: PREFIX"),
    (["split", "x", "a=1", "a=2"], 2, "a is given twice"),
    (["split", "x", "a"], 2, "a: expected OUTPUT=SHARE with a share above 0"),
    (["split", "x", "a=0", "b=1"], 2, "a=0: expected OUTPUT=SHARE"),
    (["split", "x", "a=nan"], 2, "a=nan: expected OUTPUT=SHARE"),
    (["split", "x", "=1"], 2, "=1: expected OUTPUT=SHARE"),
    (["split", "x", "a=999", "b=1"], 3, "b would have none of the 2 documents of x"),
    (["split", "x", "y=1", "b=1"], 3, "y.bin exists"),
    (["inspect", "x", "--first", "2"], 2, "--first 2: expected 0 to 1"),
    (["inspect", "x.txt"], 3, "token file x.txt.idx: No such file"),
    (["verify", "x"], 2, "one of the arguments --tokenizer --vocab-size is required"),
    (["verify", "x", "--vocab-size", "0"], 2, "--vocab-size 0: expected a whole number >= 1"),
    (["verify", "x", "--vocab-size", "many"], 2, "argument --vocab-size: invalid int value"),
    (["verify", "damaged", "--vocab-size", "9"], 3, "sequence 1 does not start where"),
    (["tokenize", "--source", "x"], 2, "a token file already has token ids"),
    (["tokenize", "--source", "x.txt", "--output", "y"], 3, "y.bin exists"),
    (["tokenize", "--source", "x.txt", "--output", "x.txt/y"], 3, "x.txt"),
    (["tokenize", "--source", "empty.txt", "--output", "new"], 3, "is empty: there is no text"),
    (
        ["tokenize", "--source", "x.txt", "--tokenizer-workers", "0"],
        2,
        "--tokenizer-workers 0: expected a whole number",
    ),
    (["tokenize", "--source", "x.txt", "--validation-fraction", "1"], 2, "--validation-fraction 1"),
    (["tokenize", "--source", "*.none"], 3, "no file matches"),
    (["tokenize", "--sauce", "x.txt"], 2, "unrecognized arguments: --sauce"),
    (["tokenizer", "--source", "x.txt", "--vocab-size", "256", "--output", "t"], 2, "--vocab-size"),
    (["tokenizer", "--source", "x.txt", "--vocab-size", "300"], 2, "required: --output"),
    (
        ["tokenizer", "--source", "x.txt", "--vocab-size", "300", "--output", "x.txt"],
        3,
        "x.txt exists",
    ),
    (
        ["tokenizer", "--source", "empty.txt", "--vocab-size", "300", "--output", "t"],
        3,
        "is empty: there is no text",
    ),
    (
        [
            *[
                "tokenizer",
                "--source",
                "x.txt",
                "--vocab-size",
                "300",
                "--output",
                "t",
                "--max-bytes",
                "0",
            ]
        ],
        2,
        "--max-bytes 0: expected a whole number >= 1",
    ),
    (["nothing"], 2, "invalid choice: 'nothing'"),
    (["inspect", "."], 3, ".: expected the prefix of a token file, such as data/texts"),
    (["merge", "/", "x"], 3, "/: expected the prefix of a token file"),
    (["split", "x", ".=1"], 3, ".: expected the prefix"),
    (["tokenize", "--source", "x.txt", "--output", "."], 3, ".: expected the prefix"),
    (
        ["tokenize", "--source", "x.txt", "--output", "new", "--validation-fraction", "0.1"],
        2,
        "--validation-fraction works only with the cache",
    ),
    (["inspect", "damaged"], 3, "sequence 1 does not start where"),
    (["merge", "new", "beyond"], 3, "beyond.idx: document 0 ends before it begins"),
]


@pytest.mark.parametrize(("argv", "code", "says"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_one_line_and_write_nothing(
    argv: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(Path("x"), [[[1, 2]], [[3]]])
    write_documents(Path("y"), [[[1]]])
    index = index_bytes([1, 1, 1], [0, 4, 4], [0, 1, 3])
    by_hand(tmp_path, index, bytes(6))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").rename(f"damaged{suffix}")
    by_hand(tmp_path, index_bytes([1, 1, 1], [0, 2, 4], [0, -(10**12), 3]), bytes(6))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").rename(f"beyond{suffix}")
    write_documents(Path("x"), [[[1, 2]], [[3]]])
    Path("x.txt").write_text("a text")
    Path("empty.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("megapipe: error: ")
    assert says in captured.err
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


def test_a_tokenizer_of_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megapipe.data.tokenizer import load_tokenizer

    (tmp_path / "x.txt").write_text("".join(TEXTS))
    output = tmp_path / "made"
    argv = ["tokenizer", "--source", str(tmp_path / "x.txt"), "--output", str(output)]
    assert main([*argv, "--vocab-size", "300"]) == 0
    assert f"{output}: 300 ids, end of documents <|endoftext|>" in capsys.readouterr().out
    tokenizer = load_tokenizer(str(output))
    assert tokenizer.vocab_size == 300
    text = "the quick brown fox €"
    ids = tokenizer.encode(text).tolist()
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert main([*argv[:3], "--output", str(tmp_path / "b"), "--vocab-size", "99999"]) == 0
    assert "the corpus is too small for more" in capsys.readouterr().out
