"""Perplexity against a plain loop over transformers' model of the exported weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megapipe.checkpoint.reader import Checkpoint
from megapipe.config.data import DataConfig
from megapipe.convert import export
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError, NumericError
from megapipe.evaluate.perplexity import measure
from megapipe.evaluate.scoring import ScoredRow, most_probable, scores
from megapipe.evaluate.texts import Document, joined, of_source, of_texts
from megapipe.inference import Model, load_model
from tests.parity.converted import write_checkpoint
from tests.parity.in_memory_models import BYTES, held_model
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config
from tests.unit.model.transformers_models import in_double, model_of

CPU = torch.device("cpu")
TEXTS = ["Some text of a few words, ", "x", "and one with é and €."]


def plain_nats(folder: Path, texts: list[str], context: int, stride: int) -> list[float]:
    """Return the loss of each token, given those before it in its window, a window at a time."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    nats = []
    for text in texts:
        ids = [256, *text.encode()]
        done = 0
        while done < len(ids) - 1:
            stop = min(done + (stride if done else context), len(ids) - 1)
            start = max(0, stop - context)
            with torch.no_grad():
                logits = hf(torch.tensor([ids[start:stop]]), use_cache=False).logits[0]
            losses = F.cross_entropy(
                logits, torch.tensor(ids[start + 1 : stop + 1]), reduction="none"
            )
            nats += losses[done - start :].tolist()
            done = stop
    return nats


@pytest.mark.parametrize(("case", "stride"), [("gpt2", 7), ("llama_gqa", 3)])
def test_it_is_that_of_a_plain_loop_over_transformers(
    case: str, stride: int, tmp_path: Path
) -> None:
    model = model_of(case).model_copy(update={"vocab_size": 257, "max_positions": 7})
    checkpoint: Checkpoint = write_checkpoint(tmp_path, model, init_random(model, seed=5))
    export(checkpoint, tmp_path / "hf")
    loaded = load_model(checkpoint, CPU)
    found = measure(loaded, of_texts(TEXTS, BYTES), stride=stride, batch=3)
    with in_double(model):
        nats = plain_nats(tmp_path / "hf", TEXTS, 7, stride)
    nbytes = sum(len(text.encode()) for text in TEXTS)
    assert (found.tokens, found.bytes, found.documents) == (len(nats), nbytes, 3)
    assert len(nats) == nbytes
    assert found.loss == pytest.approx(sum(nats) / len(nats), rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / nbytes, rel=1e-9)


@pytest.fixture(scope="module")
def small() -> Model:
    config = make_config().model
    return held_model(config, init_random(config, seed=2), context=8)


def test_an_id_of_a_token_file_that_the_tokenizer_lacks_is_named_with_its_place(
    tmp_path: Path,
) -> None:
    with TokenWriter(tmp_path / "t", token_type(300), 300) as writer:
        writer.add(np.array([5, 299]))
    message = r"token id 299 at position 1 of .*t\.bin is outside the vocabulary \(0 to 256\)"
    with pytest.raises(DataError, match=message):
        list(of_source(DataConfig(source=str(tmp_path / "t")), BYTES, RowCount()))


def test_documents_of_a_token_file_are_scored_with_their_end_marks(
    small: Model, tmp_path: Path
) -> None:
    documents = [[*b"some text", 256], [*"é".encode()], [256]]
    with TokenWriter(tmp_path / "t", token_type(257), 257) as writer:
        for ids in documents:
            writer.write(np.array(ids, np.int64))
            writer.close_sequences(np.array([len(ids)], np.int32), np.array([1]))
    given = list(of_source(DataConfig(source=str(tmp_path / "t")), BYTES, RowCount()))
    assert given == [Document(ids, n) for ids, n in zip(documents, (9, 2, 0), strict=True)]
    found = measure(small, given)
    assert (found.tokens, found.bytes, found.documents) == (13, 11, 3)
    (whole,) = joined(given, BYTES.eod)
    assert whole == Document([*documents[0], *documents[1], 256, 256], 11)


def test_files_of_texts_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": "one"}\n{"t": "two é"}\n')
    config = DataConfig(source=str(tmp_path / "a.jsonl"), text_field="t")
    given = of_source(config, BYTES, RowCount())
    assert [(bytes(d.ids).decode(), d.bytes) for d in given] == [("one", 3), ("two é", 6)]


def test_the_first_token_is_scored_or_not(small: Model) -> None:
    (score,) = scores(small, [ScoredRow([256, *b"abc"], 1)], batch=1)
    assert len(score.likelihoods) == 3
    given = measure(small, of_texts(["abc"], BYTES))
    assert given.loss == pytest.approx(-score.total / 3, rel=1e-12)
    left = measure(small, of_texts(["abc"], BYTES), unconditioned=False)
    assert left.tokens == 2
    (bare,) = scores(small, [ScoredRow([*b"abc"], 1)], batch=1)
    assert left.loss == pytest.approx(-bare.total / 2, rel=1e-12)


def test_neighbours_change_nothing(small: Model) -> None:
    rows = [ScoredRow([256, *text.encode()[:8]], 1) for text in TEXTS * 7]
    together = [score.likelihoods for score in scores(small, rows, batch=5)]
    alone = [score.likelihoods for row in rows for score in scores(small, [row], batch=1)]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_greedy_is_the_most_probable_one_of_equals_the_first(small: Model) -> None:
    columns = torch.tensor([[[0.0, 2.0, 2.0, 9.0]]])
    assert most_probable(columns, small.columns_axis, 3).tolist() == [[1]]
    row = ScoredRow([256, 5], 1)
    logits = small.logits(small.microbatch(torch.tensor([[256]])))
    assert logits is not None
    best = int(logits[0, 0].argmax())
    greedy = [
        next(scores(small, [ScoredRow([256, i], 1)], batch=1)).greedy for i in (best, best - 1)
    ]
    assert greedy == [True, False]
    assert row.first == 1


def test_mistakes_are_told(small: Model) -> None:
    with pytest.raises(DataError, match="1 document without a token to score"):
        measure(small, of_texts([""], BYTES))
    with pytest.raises(DataError, match="token id 260: the model knows 0 to 259"):
        measure(small, [Document([260], 1)])
    config = make_config().model
    params = init_random(config, seed=2)
    params["final_norm.weight"][0] = math.nan
    with pytest.raises(NumericError, match="not finite"):
        measure(held_model(config, params, context=8), of_texts(["a"], BYTES))
