"""Multiple choice: what is scored, how choices are compared, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.corpus.row_count import RowCount
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import DataError
from megapipe.evaluate.multiple_choice import (
    Accuracy,
    Question,
    answer,
    pair,
    read_questions,
    row_of,
)
from megapipe.evaluate.scoring import ScoredRow, scores
from megapipe.inference import Model
from tests.parity.in_memory_models import BYTES, held_model
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config


@pytest.fixture(scope="module")
def model() -> Model:
    config = make_config().model.model_copy(update={"max_positions": 24})
    return held_model(config, init_random(config, seed=2), context=24)


def log_likelihood(model: Model, prompt: str, continuation: str) -> float:
    ids = [256, *prompt.encode(), *continuation.encode()]
    (score,) = scores(model, [ScoredRow(ids, len(ids) - len(continuation.encode()))], batch=1)
    return score.total


def test_the_choice_is_the_likeliest_by_sum_by_bytes_and_by_tokens(model: Model) -> None:
    questions = [
        Question("two and", ("a", "a long one", "éé"), 1, "1"),
        Question("", ("xy", "x", "zzzz"), 0, "2"),
        Question("ends in space ", ("no", "yes"), 1, "3"),
        Question("same", ("a", "a", "b"), 0, "4"),
    ]
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_tokens": []}
    for each in questions:
        sums = np.array([log_likelihood(model, each.prompt, " " + c) for c in each.choices])
        nbytes = np.array([len(c.encode()) for c in each.choices])
        # white space at the prompt's end is a token of what follows
        tokens = nbytes + 1 + each.prompt.endswith(" ")
        if each.prompt.endswith(" "):
            bare = each.prompt.rstrip()
            sums = np.array([log_likelihood(model, bare, "  " + c) for c in each.choices])
        for name, values in (
            ("acc", sums),
            ("acc_norm", sums / nbytes),
            ("acc_tokens", sums / tokens),
        ):
            right[name].append(int(values.argmax()) == each.answer)
    found = answer(model, questions, batch=3)
    for name, each_right in right.items():
        share = getattr(found, name)
        assert share.value == sum(each_right) / 4
        sample = np.std(np.array(each_right, float), ddof=1) / 2
        assert share.stderr == pytest.approx(sample, rel=1e-12)
    assert found.questions == 4
    same = answer(model, [Question("p", ("a", "a"), 0, "1")])
    assert (same.acc.value, same.acc.stderr, same.acc.ties) == (1.0, None, 1)
    assert "acc 1.0000 (1 tie, the first taken)" in same.describe()


def test_the_standard_error_is_that_of_the_mean() -> None:
    draws = [True] * 3 + [False] * 4
    expected = np.std(draws, ddof=1) / math.sqrt(7)
    assert Accuracy.of(draws, 0).stderr == pytest.approx(expected, rel=1e-12)


def test_tokens_are_those_of_prompt_and_choice_together(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    vocab = {c: i for i, c in enumerate(["a", "b", " ", " b", "a b", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(" ", "b")]))
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert pair(tokenizer, "a ", "b") == ([0], [3]), "the space goes with the word"
    assert pair(tokenizer, "a", " b") == ([0], [3])
    assert pair(BYTES, "", "b") == ([], [98])


def test_a_row_keeps_the_end_of_what_does_not_fit() -> None:
    assert row_of([9], [1, 2, 3], [4, 5], 5) == (ScoredRow([9, 1, 2, 3, 4, 5], 4), False)
    assert row_of([9], [1, 2, 3], [4, 5], 4) == (ScoredRow([1, 2, 3, 4, 5], 3), True)
    assert row_of([9], [1, 2, 3], [4, 5], 2) == (ScoredRow([3, 4, 5], 1), True)


def test_what_does_not_fit_is_refused_or_cut(model: Model) -> None:
    long = [Question("a prompt of some length", ("a", "b"), 0, "f: line 1")]
    with pytest.raises(DataError, match=r"f: line 1: prompt and choices are longer.* 24 tokens"):
        answer(model, long)
    found = answer(model, long, truncate=True)
    assert found.cut == 1
    assert "1 longer than the context" in found.describe()
    wide = [Question("p", ("a", "b" * 24), 0, "f: line 2")]
    with pytest.raises(DataError, match="has 25 tokens: expected 1 to 24"):
        answer(model, wide, truncate=True)


GOOD = {"prompt": "p", "choices": ["a", "b"], "answer": 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: no JSON"),
        ([], "line 2: expected an object"),
        ({**GOOD, "prompt": 3}, "line 2: expected a text as 'prompt' or 'question'"),
        ({**GOOD, "choices": ["a"]}, "line 2: 1 choices: expected two at least"),
        ({**GOOD, "choices": ["a", ""]}, "line 2: expected 'choices', a list of texts"),
        ({**GOOD, "choices": "ab"}, "line 2: expected 'choices', a list of texts"),
        ({**GOOD, "answer": 2}, "line 2: 'answer' is 2: expected the number of a choice, 0 to 1"),
        ({**GOOD, "answer": -1}, "'answer' is -1"),
        ({**GOOD, "answer": True}, "'answer' is true"),
        ({**GOOD, "answer": "b"}, "'answer' is \"b\""),
        ({"prompt": "p", "choices": ["a", "b"]}, "'answer' is null"),
    ],
)
def test_a_row_that_is_no_question_is_named(row: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    text = row if isinstance(row, str) else json.dumps(row)
    file.write_text(f"{json.dumps(GOOD)}\n{text}\n")
    with pytest.raises(DataError) as error:
        list(read_questions(file, RowCount()))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_of_questions(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "é\u2028", "choices": ["a", "b"], "answer": 0}\n\n')
    (question,) = read_questions(file, RowCount())
    assert (question.prompt, question.answer) == ("é\u2028", 0)
    file.write_text("\n")
    with pytest.raises(DataError, match="it has no questions"):
        list(read_questions(file, RowCount()))
    with pytest.raises(DataError, match="No such file"):
        list(read_questions(tmp_path / "missing", RowCount()))
