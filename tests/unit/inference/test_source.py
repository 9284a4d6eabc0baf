"""How texts begin and end by what is known of a model: of a run, and of a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megapipe.convert import HuggingFaceFolder, export
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.evaluate.commands import main as evaluate
from megapipe.generate.command import main
from megapipe.inference import ModelInfo, load_model
from megapipe.train.moe.upcycle import Upcycled
from megapipe.train.start_point import StartPoint as StartPoint
from tests.parity import chats
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config, write
from tests.unit.model.transformers_models import model_of

BOS, END, TURN = "<|begin_of_text|>", "<|endoftext|>", "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder whose tokenizer puts a token before a text, and whose texts have two ends."""
    path = tmp_path_factory.mktemp("folder")
    model = model_of("llama").model_copy(update={"vocab_size": 300, "dtype": "fp32"})
    params = init_random(model, seed=2, dtype=torch.float32)
    export(write_checkpoint(path / "run", model, params), path / "hf", tokenizer="none")
    backend = chats.tokenizer()
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=END).save_pretrained(
        path / "hf"
    )
    ends = [backend.token_to_id(END), backend.token_to_id(TURN)]
    (path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path


def test_a_folder_s_texts_begin_and_end_as_its_files_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ModelInfo.of(HuggingFaceFolder.open(folder / "hf"))
    tokenizer = load_tokenizer(str(folder / "hf"))
    assert source.opening == source.start == (tokenizer.added_tokens[BOS],)
    assert source.ends == {tokenizer.added_tokens[END], tokenizer.added_tokens[TURN]}
    assert source.context == model_of("llama").max_positions
    given = [str(folder / "hf"), "--prompt", "the", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(given) == 0
    assert capsys.readouterr().out.startswith("the")


def test_which_of_two_files_is_read_is_told_by_every_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = shutil.copytree(folder / "hf", tmp_path / "hf")
    (both / "model.safetensors.index.json").write_text("{}")
    line = (
        f"{both}/model.safetensors is read, as transformers does, and model.safetensors.index.json"
    )
    for done in (
        main([str(both), "--prompt", "the", "--max-new-tokens", "1"]),
        evaluate(["perplexity", str(both), "--text", "the"]),
    ):
        assert done == 0
    assert capsys.readouterr().err == 2 * f"megapipe: {line} in the same folder is not\n"
    start = StartPoint(weights=Upcycled(HuggingFaceFolder.open(both), {}))
    assert list(start.notes()) == [f"{line} in the same folder is not"]


def test_a_damaged_checkpoint_that_is_passed_over_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (7, 8):
        write(tmp_path, make_config(), step=step)
    assert main([str(tmp_path), "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().err == ""
    next((tmp_path / "checkpoints/step-00000008").glob("*.safetensors")).unlink()
    assert main([str(tmp_path), "--max-new-tokens", "1"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("megapipe: skipped a damaged checkpoint: ")


def test_a_run_s_texts_begin_with_the_end_of_a_document(folder: Path) -> None:
    from megapipe.checkpoint.find import find_checkpoint

    weights = find_checkpoint(folder / "run")
    source = ModelInfo.of(weights, context=5)
    assert (source.opening, source.ends, source.context) == ((256,), {256}, 5)
    other = ModelInfo.of(weights, tokenizer=str(folder / "hf"))
    assert other.opening == (other.tokenizer.eod,)


def test_a_tokenizer_that_marks_nothing_has_no_opening(folder: Path) -> None:
    backend = chats.tokenizer()
    backend.save(str(folder / "plain.json"))
    assert load_tokenizer(str(folder / "plain.json")).bos_tokens == ()
    source = ModelInfo.of(
        HuggingFaceFolder.open(folder / "hf"), tokenizer=str(folder / "plain.json")
    )
    assert (source.opening, source.start) == ((), (source.tokenizer.eod,))


def test_models_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder / "hf", bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    weights = HuggingFaceFolder.open(bare)
    with pytest.raises(DataError, match="has no tokenizer: pass --tokenizer"):
        ModelInfo.of(weights)
    (bare / "generation_config.json").write_text("[]")
    with pytest.raises(DataError, match="no generation config"):
        ModelInfo.of(weights, tokenizer="byte")
    (bare / "generation_config.json").unlink()
    assert load_model(weights, torch.device("cpu"), tokenizer="byte").vocab_size == 300
    small = model_of("llama").model_copy(update={"vocab_size": 100, "dtype": "fp32"})
    params = init_random(small, seed=2, dtype=torch.float32)
    with pytest.raises(ConfigError, match="tokenizer byte has 257 ids, the checkpoint's model 100"):
        ModelInfo.of(write_checkpoint(tmp_path / "small", small, params))
