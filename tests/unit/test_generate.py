"""Text from a checkpoint: what is sampled, against the plain reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor

from megapipe.checkpoint import Alone, Meta, Piece, save, whole
from megapipe.cli import flatten
from megapipe.config import Config
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.generate import Generator, find_checkpoint
from megapipe.layout import resolve

CONTEXT = 8
TOKENIZER = load_tokenizer("byte")
CPU = torch.device("cpu")


def make_config(*, vocab: int = 260, tied: bool = False) -> Config:
    config = Config.model_validate(
        {
            "model": {
                "layers": 2,
                "hidden": 16,
                "vocab_size": vocab,
                "tied_embeddings": tied,
                "dropout": 0.5,
            },
            "train": {"sequence_length": CONTEXT},
        }
    )
    return resolve(config, 1, min(vocab, TOKENIZER.vocab_size))[0]


def write(folder: Path, config: Config, *, step: int = 7, seed: int = 3) -> dict[str, Tensor]:
    """A checkpoint of random weights under `folder`; returns them."""
    model = config.model.model_copy(update={"dropout": 0.0})
    params = reference.init_random(model, seed=seed, dtype=torch.float32)
    pieces = [
        Piece(f"model/{name}", tuple(t.shape), whole(tuple(t.shape)), t)
        for name, t in params.items()
    ]
    meta = Meta(run_id="a", layout={}, coordinates={"step": step}, config=flatten(config))
    save(folder / "checkpoints", step=step, pieces=pieces, meta=meta, group=Alone())
    return params


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Generator, dict[str, Tensor], Config]:
    folder, config = tmp_path_factory.mktemp("run"), make_config(tied=request.param)
    params = write(folder, config)
    return Generator(find_checkpoint(folder), CPU), params, config


Model = tuple[Generator, dict[str, Tensor], Config]


def plain_logits(model: Model, ids: list[int]) -> Tensor:
    """The reference's, for the last CONTEXT of `ids`: dropout is off in generation."""
    _, params, config = model
    tokens = torch.tensor([ids[-CONTEXT:]], dtype=torch.int64)
    config_model = config.model.model_copy(update={"dropout": 0.0})
    return reference.logits(params, config_model, tokens)[0, -1, : TOKENIZER.vocab_size]


@pytest.mark.parametrize("length", [1, CONTEXT, CONTEXT + 5])
def test_logits_are_the_reference_s_and_a_long_context_slides(model: Model, length: int) -> None:
    ids = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    logits = model[0].logits(ids)
    assert logits.shape == (TOKENIZER.vocab_size,), "no id that the tokenizer lacks"
    torch.testing.assert_close(logits, plain_logits(model, ids), rtol=1e-5, atol=1e-5)


def greedy(model: Model, prompt: str, tokens: int) -> list[int]:
    ids = [TOKENIZER.eod, *TOKENIZER.encode(prompt)]
    start = len(ids)
    while len(ids) < start + tokens:
        token = int(plain_logits(model, ids).argmax())
        if token == TOKENIZER.eod:
            break
        ids.append(token)
    return ids[start:]


@pytest.mark.parametrize("prompt", ["", "a prompt longer than the context"])
def test_temperature_zero_and_one_candidate_take_the_most_probable(
    model: Model, prompt: str
) -> None:
    expected = greedy(model, prompt, 20)
    assert len(expected) > CONTEXT
    assert list(model[0].generate(prompt, tokens=20, temperature=0)) == expected
    for seed in (0, 1):
        alone = model[0].generate(prompt, tokens=20, temperature=2.0, top_k=1, seed=seed)
        assert list(alone) == expected


def test_a_seed_gives_the_same_text_again(model: Model) -> None:
    texts = [list(model[0].generate("x", tokens=20, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_top_k_draws_among_the_most_probable_alone(model: Model) -> None:
    best = plain_logits(model, [TOKENIZER.eod]).topk(3).indices.tolist()
    drawn = {
        token
        for seed in range(60)
        for token in model[0].generate("", tokens=1, temperature=5.0, top_k=3, seed=seed)
    }
    assert drawn == set(best) - {TOKENIZER.eod}
    free = [t for s in range(60) for t in model[0].generate("", tokens=1, temperature=5.0, seed=s)]
    assert not set(free) <= set(best), "without it others are drawn too"


def test_the_end_of_a_document_ends_the_text(tmp_path: Path) -> None:
    config = make_config()
    write(tmp_path, config)
    generator = Generator(find_checkpoint(tmp_path), CPU)
    direction = torch.ones(16)
    with torch.no_grad():
        assert generator.module.final_norm.bias is not None
        assert generator.module.head is not None
        generator.module.final_norm.bias.copy_(direction)
        generator.module.head.weight[TOKENIZER.eod] = 100 * direction
    assert list(generator.generate("x", tokens=5)) == []


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
        Generator(find_checkpoint(tmp_path), CPU)
