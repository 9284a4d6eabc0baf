"""Documents rearranged to prefix, suffix and middle: each can be put back."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.data.build import build_batches
from megapipe.data.dataset import Stream, TokenDataset
from megapipe.data.fill_in_the_middle import (
    FillInTheMiddle,
    FimTokens,
    PackedInTheMiddle,
    WindowsInTheMiddle,
)
from megapipe.data.packing import PackingRule, open_packing
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError
from megapipe.layout.resolve import resolve
from tests.unit.data.data_cases import TEXTS, train_bpe

P, S, M, EOD = MARKS = (900, 901, 902, 903)
L = 16


def change(
    rate: float = 1.0, spm_rate: float = 0.5, seed: int = 3, source: str = ""
) -> FillInTheMiddle:
    return FillInTheMiddle(FimTokens(P, S, M), EOD, rate, spm_rate, seed, source)


def undone(tokens: list[int]) -> list[int]:
    """Restore the document that was rearranged, by the definition of PSM. An SPM one is a PSM one
    without a prefix."""
    if tokens[:1] != [P]:
        assert not set(tokens) & {P, S, M}
        return tokens
    end = [EOD] if tokens[-1] == EOD else []
    inside = tokens[1 : len(tokens) - len(end)]
    assert sorted(set(inside) & {P, S, M}) == [S, M]
    suffix, middle = inside.index(S), inside.index(M)
    assert suffix < middle
    return inside[:suffix] + inside[middle + 1 :] + inside[suffix + 1 : middle] + end


def documents(count: int, seed: int = 0) -> list[np.ndarray]:
    """Draw documents of 0 tokens and more, each token once; the last one has no end mark."""
    draw = np.random.default_rng(seed)
    lengths = [0, 1, 2, *draw.integers(0, 30, count)]
    found = [np.append(draw.permutation(800)[:n], EOD) for n in lengths]
    return [*found, found.pop()[:-1]]


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_each_document_can_be_put_back(spm_rate: float) -> None:
    given = documents(200)
    orders = Counter()
    for before, after in zip(given, change(spm_rate=spm_rate)(7, given), strict=True):
        length = len(before) - (before[-1:] == EOD).sum()
        assert undone(after.tolist()) == before.tolist()
        assert len(after) == len(before) + 3 * (length > 0)
        if length:
            assert sorted(after) == sorted([*before, P, S, M])
            orders[after[1] == S] += 1
    assert bool(orders[False]) != bool(spm_rate), "an empty prefix looks alike in both"


def test_shares_and_cuts() -> None:
    """Both cuts anywhere, before the first token and after the last too."""
    given = [np.arange(4)] * 20_000
    found = change(rate=0.7, spm_rate=0.3)(0, given)
    changed = [tokens.tolist() for tokens in found if tokens[0] == P]
    assert len(changed) / len(given) == pytest.approx(0.7, abs=0.015)
    # an empty prefix, 9 of 25 pairs of cuts, looks alike in both orders
    alike = sum(tokens[1] == S for tokens in changed) / len(changed)
    assert alike == pytest.approx(0.3 + 0.7 * 9 / 25, abs=0.015)
    psm = [tokens for tokens in changed if tokens[1] != S]
    cuts = Counter((t.index(S) - 1, t.index(S) - 1 + len(t) - 1 - t.index(M)) for t in psm)
    pairs = {(a, b): 2 - (a == b) for a, b in itertools.product(range(1, 5), repeat=2) if a <= b}
    assert set(cuts) == set(pairs)
    for pair, times in pairs.items():
        assert cuts[pair] / len(psm) == pytest.approx(times / 16, abs=0.015), pair


def test_it_is_a_function_of_the_number() -> None:
    given = [np.arange(100)] * 3

    def text(chosen: FillInTheMiddle, sample: int) -> list[list[int]]:
        return [tokens.tolist() for tokens in chosen(sample, given)]

    assert text(change(), 2**40) == text(change(), 2**40)
    others = [text(change(), 5), text(change(), 6), text(change(seed=4), 5)]
    others.append(text(change(source="web"), 5))
    each = [str(tokens) for found in others for tokens in found]
    assert len(set(each)) == len(each)


def write(prefix: Path, given: list[np.ndarray]) -> TokenFile:
    with TokenWriter(prefix, token_type(1000), 1000) as writer:
        for document in given:
            writer.add(document)
    return TokenFile(prefix)


def test_windows_keep_their_length(tmp_path: Path) -> None:
    windows = TokenDataset(write(tmp_path / "x", documents(80)), L)
    rearranged = WindowsInTheMiddle(windows, change(rate=0.8))
    changed = 0
    for number in range(len(windows)):
        before = windows.sample(number).tolist()
        sample = rearranged.labelled(number)
        after = [*sample.tokens.tolist(), int(sample.labels[-1])]
        assert len(after) == L + 1
        assert sample.tokens[1:].tolist() == sample.labels[:-1].tolist()
        assert sample.mask.all()
        assert sample.documents is None
        # all but what is pushed over the end can be put back
        while EOD in after:
            end, was = after.index(EOD) + 1, before.index(EOD) + 1
            assert undone(after[:end]) == before[:was]
            changed += after[0] == P
            before, after = before[was:], after[end:]
        left = Counter(after) - Counter([P, S, M])
        assert not left - Counter(before), "and nothing is added but the marks"
    assert changed > 20


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_packed_documents_fit_with_their_marks(rate: float, tmp_path: Path) -> None:
    given = documents(60)
    file = write(tmp_path / "x", given)
    packing = open_packing(Stream.of(file), PackingRule(L, spare=3), tmp_path / "cache")
    dataset = PackedInTheMiddle(file, packing, L, EOD, change(rate=rate))
    found = []
    for number in range(len(dataset)):
        sample = dataset.labelled(number)
        assert len(sample.tokens) == L
        for document in range(sample.documents.max() + 1):
            here = (sample.documents == document) & sample.mask
            if here.any():
                tokens, labels = sample.tokens[here], sample.labels[here]
                assert tokens[1:].tolist() == labels[:-1].tolist()
                found.append(undone([*tokens.tolist(), int(labels[-1])]))
    room = L - 3
    pieces = [
        d[start : start + room + 1].tolist() for d in given for start in range(0, len(d) - 1, room)
    ]
    assert sorted(found) == sorted(pieces)
    assert "whose documents are rearranged (data.fim_rate)" in dataset.describe_position(
        0, 0, label=True
    )
    with pytest.raises(DataError, match=r"train.sequence_length=3: expected more than the 3"):
        open_packing(Stream.of(file), PackingRule(3, spare=3), tmp_path / "cache")


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer with the marks <p>, <s> and <m>; write the texts `t` and `u`."""
    monkeypatch.chdir(tmp_path)
    train_bpe(["<|endoftext|>", "<p>", "<s>", "<m>"]).save("tokenizer.json")
    for name in "tu":
        Path(name).mkdir()
        for number, text in enumerate(TEXTS):
            Path(name, f"{number}.txt").write_text(text)
    return load_tokenizer("tokenizer.json")


def config(*given: str) -> Config:
    usual = ["train.sequence_length=64", "train.steps=2", "train.global_batch=4"]
    usual += ["data.tokenizer=tokenizer.json", "data.validation_fraction=0.3"]
    return resolve(parse([*usual, *given]).config, 1, 320)[0]


@pytest.mark.parametrize("samples", ["stateless", "packed"])
def test_what_is_held_out_stays_as_it_is(samples: str, tokenizer: Tokenizer) -> None:
    usual = ["data.mixture.a.source=t", "data.mixture.b.source=u", f"data.sample_format={samples}"]
    fim = ["data.fim_rate=0.9", "data.fim_tokens=[<p>, <s>, <m>]"]
    marks = {tokenizer.added_tokens[name] for name in ("<p>", "<s>", "<m>")}
    rows, held, digests = [], [], []
    for more in ([], fim, [*fim, "data.fim_spm_rate=1"]):
        chosen = config(*usual, *more)
        sources = load_sources(chosen, tokenizer)
        training, held_out = build_batches(chosen, tokenizer, sources)
        rows.append(training.rows(range(len(training))))
        held.append([each.batches.rows(range(len(each.batches))) for each in held_out])
        digests.append(sources.digest)
    assert len(set(digests)) == 1, "the marks are no part of the corpus: their keys are compared"
    assert [bool(marks & set(r.tokens.flatten().tolist())) for r in rows] == [False, True, True]
    for others in held[1:]:
        for first, other in zip(held[0], others, strict=True):
            assert (first.tokens == other.tokens).all()
    with pytest.raises(DataError, match=r"'tokenizer.json' has no token '<x>' \(data.fim_tokens\)"):
        load_sources(
            config(*usual, "data.fim_rate=1", "data.fim_tokens=[<p>, <x>, <m>]"), tokenizer
        )
