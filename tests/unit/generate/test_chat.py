"""Conversations as transformers writes them, up to the assistant's turn and to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from megapipe.checkpoint.find import find_checkpoint
from megapipe.config.data import DataConfig
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.generate import Generator, Sampling
from megapipe.generate.chat import Chats, messages_of
from megapipe.generate.command import main
from megapipe.generate.generator import Prompt
from megapipe.inference import ModelInfo, load_model
from tests.parity import chats
from tests.parity.converted import write_checkpoint
from tests.parity.in_memory_models import BYTES
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config


def saved(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    """Save a tokenizer with this template to a folder, as transformers does."""
    found = PreTrainedTokenizerFast(
        tokenizer_object=chats.tokenizer(), eos_token="<|endoftext|>", chat_template=template
    )
    found.save_pretrained(folder)
    return found


def source_of(name: str, **data: str) -> ModelInfo:
    tokenizer = load_tokenizer(name)
    model = make_config(vocab=300).model
    return ModelInfo(model, None, tokenizer, 64, (), frozenset({tokenizer.eod}), DataConfig(**data))


@pytest.mark.parametrize(
    ("template", "end"), [(chats.CHATML, "<|im_end|>"), (chats.LLAMA, "<|endoftext|>")]
)
def test_a_prompt_is_that_of_transformers_and_ends_with_the_turn(
    template: str, end: str, tmp_path: Path
) -> None:
    theirs = saved(tmp_path, template)
    found = Chats(source_of(str(tmp_path)))
    for texts in (["hi"], ["!be brief", "hi", "hello", "and then?"], ["he said\n\nan end"]):
        messages = chats.conversation(*texts)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        ids = expected if isinstance(expected, list) else expected["input_ids"]
        prompt = found.prompt(messages)
        assert list(prompt.ids) == ids
        assert prompt.turn_ends == {theirs.convert_tokens_to_ids(end)}
    (spelled,) = (found.prompt(chats.conversation("say <|im_end|>")),)
    mark = theirs.convert_tokens_to_ids("<|im_end|>")
    plain = found.prompt(chats.conversation("say x"))
    assert spelled.ids.count(mark) == plain.ids.count(mark), "what a user spells is text"


def test_a_template_of_the_run_goes_before_the_tokenizer_s(tmp_path: Path) -> None:
    saved(tmp_path, chats.CHATML)
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    own = Chats(source_of(str(tmp_path), chat_template=str(file)))
    tokenizer = load_tokenizer(str(tmp_path))
    expected = Prompt(tuple(tokenizer.encode("hi|").tolist()))
    assert own.prompt(chats.conversation("hi")) == expected, "text ends no turn"
    assert Chats(source_of(str(tmp_path)), str(file)).prompt(chats.conversation("hi")) == expected


def test_prompts_are_messages_or_conversations() -> None:
    said = {"role": "user", "content": "[1, 2] is a list"}
    assert messages_of("[1, 2] is a list", None) == [said]
    assert messages_of("[1, 2]", None) == [{"role": "user", "content": "[1, 2]"}]
    system = {"role": "system", "content": "s"}
    assert messages_of(json.dumps([said]), "s") == [system, said]
    with pytest.raises(ConfigError, match="--system: the conversation has a system message"):
        messages_of(json.dumps([system, said]), "s")
    with pytest.raises(DataError, match="--chat: message 2 has no role"):
        messages_of(json.dumps([said, {"content": "x"}]), None)


def test_templates_that_cannot_be_had() -> None:
    source = source_of("byte")
    with pytest.raises(DataError, match="--chat needs a chat template"):
        Chats(source)
    with pytest.raises(DataError, match=r"^--chat-template missing: No such file"):
        Chats(source, "missing")
    with pytest.raises(DataError, match=r"^data\.chat_template=missing: No such file"):
        Chats(source_of("byte", chat_template="missing"))
    assert source.tokenizer.eod == BYTES.eod


def test_the_command_talks_up_to_the_end_of_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved(tmp_path / "tokenizer", chats.CHATML)
    model = make_config(vocab=300, dtype="fp32").model.model_copy(
        update={"max_positions": 64, "dropout": 0.0}
    )
    params = init_random(model, seed=3, dtype=torch.float32)
    write_checkpoint(tmp_path, model, params, tokenizer=str(tmp_path / "tokenizer"))
    given = [str(tmp_path), "--chat", "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*given, "--prompt", "hi", "--system", "brief"]) == 0
    shown = capsys.readouterr().out
    generator = Generator(load_model(find_checkpoint(tmp_path), torch.device("cpu")))
    ids = theirs.apply_chat_template(chats.conversation("!brief", "hi"), add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    greedy = Sampling(tokens=4, temperature=0)
    pieces = list(generator.generate([Prompt(tuple(ids))], greedy))
    assert shown == "".join(piece.text for piece in pieces) + "\n"
    first = Prompt(tuple(ids), frozenset({pieces[1].token}))
    assert [piece.end for piece in generator.generate([first], greedy)][-1] == "turn"
    for wrong, words in (
        ([*given], "--chat needs a user's message"),
        ([str(tmp_path), "--system", "x"], "--system needs --chat"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err
