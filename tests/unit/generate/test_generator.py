"""Text from a checkpoint: what is read and chosen, against the plain reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.errors import CheckpointError, ConfigError, NumericError
from megapipe.generate import Generator, Sampling, find_checkpoint
from megapipe.generate.cached_decoder import window_start
from megapipe.inference import load_model
from tests.parity import reference
from tests.unit.generate.checkpoints import CONTEXT, TOKENIZER, make_config, write

CPU = torch.device("cpu")
GREEDY = Sampling(tokens=20, temperature=0)
LLAMA = {"positions": "rotary", "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu"}


Model = tuple[Generator, dict[str, Tensor], Config]


def make_model(folder: Path, config: Config) -> Model:
    params = write(folder, config)
    return Generator(load_model(find_checkpoint(folder), CPU)), params, config


@pytest.fixture(scope="module", params=["gpt", "llama", "documents"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = {
        "gpt": make_config(tied_embeddings=False),
        "llama": make_config(**LLAMA),
        "documents": make_config(document_mask=True),
    }[request.param]
    return make_model(tmp_path_factory.mktemp("run"), config)


def plain_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Compute the reference's logits anew from what is seen of `ids`; generation has no dropout."""
    _, params, config = model
    seen = ids[window_start(len(ids), CONTEXT) :]
    config_model = config.model.model_copy(update={"dropout": 0.0})
    end = TOKENIZER.eod if config.data.document_mask else None
    logits = reference.logits(params, config_model, torch.tensor([seen], dtype=torch.int64), end)
    return logits[0, -1, : TOKENIZER.vocab_size]


def greedy(model: Model, prompt: str, tokens: int) -> list[int]:
    ids = [TOKENIZER.eod, *TOKENIZER.encode(prompt)]
    start = len(ids)
    while len(ids) < start + tokens:
        ids.append(int(plain_logits(model, ids).argmax()))
        if ids[-1] == TOKENIZER.eod:
            break
    return ids[start:]


def tokens_of(generator: Generator, prompts: list[str], sampling: Sampling) -> list[list[int]]:
    """Generate for all prompts together and return the tokens that each gets."""
    found: dict[int, list[int]] = defaultdict(list)
    for piece in generator.generate(prompts, sampling):
        found[piece.prompt].append(piece.token)
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("context", [1, 2, 3, 8])
def test_the_window_is_the_end_of_a_text_and_at_least_half_full(context: int) -> None:
    starts = [window_start(length, context) for length in range(1, 40)]
    for length, start in enumerate(starts, 1):
        assert max(context - context // 2, 1) <= min(length - start, context) == length - start or (
            start == 0 and length < context
        )
    assert len(set(starts)) <= 2 + 40 // max(context // 2, 1), "most tokens move nothing"


def test_texts_of_unequal_length_read_token_by_token_have_the_reference_s_logits(
    model: Model,
) -> None:
    """Beyond the model's positions, with documents that end, and one text that ends early."""
    draw = torch.Generator().manual_seed(1)
    eod = TOKENIZER.eod
    texts = [torch.randint(256, (n,), generator=draw).tolist() for n in (1, 5, CONTEXT + 6, 3)]
    texts[1][2] = eod
    reading = model[0].read(texts, room=3 * CONTEXT)
    for step in range(3 * CONTEXT):
        logits = reading.logits()[:, : TOKENIZER.vocab_size]
        expected = torch.stack([plain_logits(model, text) for text in texts])
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        new: list[int | None] = torch.randint(256, (len(texts),), generator=draw).tolist()
        if step % 5 == 2:
            new[0] = eod
        if step in (4, 13):
            new[-2] = None  # the longest one, then another
        reading.append(new)
        texts = [[*text, t] for text, t in zip(texts, new, strict=True) if t is not None]
    assert len(texts) == 2


@pytest.mark.parametrize("length", [1, CONTEXT - 2, 5 * CONTEXT])
def test_each_token_is_read_once_but_where_the_window_moves(
    model: Model, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, read = model[0], []
    embedding = generator.model.module.embedding
    assert embedding is not None
    look_up = embedding.forward
    monkeypatch.setattr(embedding, "forward", lambda ids: read.append(ids.shape) or look_up(ids))
    reading = generator.read([[1] * length], room=4 * CONTEXT)
    for _ in range(4 * CONTEXT):
        reading.logits()
        reading.append([2])
    again = CONTEXT - CONTEXT // 2 + 1  # tokens that are left when the window moves, and a new one
    sizes = [columns for _, columns in read[1:]]
    assert set(sizes) == {1, again}
    assert sizes.count(again) <= 4 * CONTEXT // (CONTEXT // 2)


PROMPTS = ["", "abc", "a prompt longer than the context", "ab", "abc"]


def test_temperature_zero_takes_the_most_probable_in_a_batch_too(model: Model) -> None:
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    assert max(map(len, expected)) > CONTEXT
    assert tokens_of(model[0], PROMPTS, GREEDY) == expected
    small = [
        piece.token for piece in model[0].generate(PROMPTS, GREEDY, batch=2) if piece.prompt == 2
    ]
    assert small == expected[2]
    for sampling in (
        Sampling(tokens=20, temperature=2.0, top_k=1, seed=1),
        Sampling(tokens=20, temperature=2.0, top_p=1e-9, seed=2),
    ):
        assert tokens_of(model[0], PROMPTS, sampling) == expected


def test_a_prompt_and_a_seed_give_the_same_text_alone_and_among_others(model: Model) -> None:
    sampling = Sampling(tokens=20, seed=1)
    together = tokens_of(model[0], PROMPTS, sampling)
    alone = [tokens_of(model[0], [prompt], sampling)[0] for prompt in PROMPTS]
    assert together[:4] == alone[:4]
    assert together[1] != together[4], "the same prompt twice is two texts"
    assert tokens_of(model[0], ["abc", "abc"], sampling) == [together[1], together[4]]
    assert tokens_of(model[0], ["abc"], Sampling(tokens=20, seed=2)) != [together[1]]


def test_a_text_ends_with_its_document_a_stop_string_or_its_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path, make_config())
    greedy_text = TOKENIZER.decode(greedy(model, "x", 20))
    full = list(model[0].generate(["x"], GREEDY))
    assert "".join(piece.text for piece in full) == greedy_text
    assert [piece.end for piece in full] == [None] * 19 + ["tokens"]
    stop = greedy_text[4:6]
    stopped = list(model[0].generate(["x"], Sampling(tokens=20, temperature=0, stop=(stop,))))
    assert "".join(piece.text for piece in stopped) == greedy_text[: greedy_text.index(stop)]
    assert stopped[-1].end == "stop"
    norm, head = model[0].model.module.final_norm, model[0].model.module.head
    assert norm.bias is not None
    assert head is not None
    norm.bias.data.fill_(1)
    head.weight.data[TOKENIZER.eod] = 100
    assert [piece[1:] for piece in model[0].generate(["x"], GREEDY)] == [
        (TOKENIZER.eod, "", "document")
    ]


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    generator, *_ = make_model(tmp_path, make_config())
    head = generator.model.module.head
    assert head is not None
    for bad in (float("nan"), float("inf")):
        head.weight.data[3] = bad
        with pytest.raises(NumericError, match="not finite"):
            next(generator.generate(["x"], GREEDY))


def test_the_newest_intact_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    for step in (3, 9, 12):
        write(tmp_path, make_config(), step=step, seed=step)
    folders = sorted((tmp_path / "checkpoints").glob("*/manifest.json"))
    assert len(folders) == 3
    found = {str(path.parent): find_checkpoint(path.parent) for path in folders}
    assert sorted(c.manifest.step for c in found.values()) == [3, 9, 12]
    assert find_checkpoint(tmp_path).manifest.step == 12
    newest = next(Path(name) for name, c in found.items() if c.manifest.step == 12)
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert find_checkpoint(tmp_path).manifest.step == 9
    with pytest.raises(CheckpointError):
        find_checkpoint(newest)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has no checkpoint"):
        find_checkpoint(tmp_path)


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, make_config(vocab=100).model_copy(update={"data": Config().data}))
    with pytest.raises(ConfigError, match="tokenizer byte has 257 ids, the checkpoint's model 100"):
        load_model(find_checkpoint(tmp_path), CPU)
