"""The commands of docs/evaluating.md in one process, and their mistakes in one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from megapipe.evaluate.commands import main
from megapipe.evaluate.commands import parser as evaluate_parser
from megapipe.evaluate.commands.harness import lines_of
from megapipe.generate.command import main as generate
from megapipe.generate.command import parser as generate_parser
from tests.parity import chats
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config

PAGE = (Path(__file__).resolve().parents[3] / "docs/evaluating.md").read_text(encoding="utf-8")
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [shlex.split(line) for line in SHELL.splitlines() if "scripts/" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write runs as the page names them, with texts and questions."""
    path = tmp_path_factory.mktemp("page")
    model = make_config(vocab=300, dtype="fp32").model.model_copy(
        update={"max_positions": 96, "dropout": 0.0}
    )
    params = init_random(model, seed=3, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chats.tokenizer(), eos_token="<|endoftext|>", chat_template=chats.CHATML
    )
    tokenizer.save_pretrained(path / "tokenizer")
    write_checkpoint(path / "runs/quickstart", model, params)
    (path / "runs/latest").symlink_to("quickstart")
    write_checkpoint(path / "runs/chat", model, params, tokenizer=str(path / "tokenizer"))
    (path / "texts.jsonl").write_text('{"text": "some words"}\n{"text": "others"}\n')
    question = {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    (path / "questions.jsonl").write_text(f"{json.dumps(question)}\n")
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_of_the_page_work(
    command: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands for several processes, and those for tasks on the hub, are only parsed."""
    monkeypatch.chdir(folder)
    at = next(i for i, word in enumerate(command) if word.startswith("scripts/"))
    writes, given = command[at] == "scripts/generate.py", command[at + 1 :]
    if "megapipe.launch" in command or given[0] == "harness":
        (generate_parser() if writes else evaluate_parser()).parse_args(given)
        return
    assert (generate([*given, "--max-new-tokens", "3"]) if writes else main(given)) == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert shown.err == ""


def test_a_result_is_a_line_or_an_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["perplexity", str(folder / "runs/quickstart"), "--text", "é x"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(given) == 0
    assert capsys.readouterr().out == (
        f"perplexity {found['perplexity']:.4f} | {found['loss']:.6f} nats per token | "
        f"{found['bits_per_byte']:.4f} bits per byte | 4 tokens, 4 bytes, 1 document | "
        "context 96, stride 96\n"
    )


def test_rows_and_surrogates_are_told_beside_the_result(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tokenizer takes no lone surrogate."""
    monkeypatch.chdir(tmp_path)
    run = str(folder / "runs/chat")
    rows = [{"text": "a \ud83d\ude42\ud83d"}, {"text": None}, {"text": ""}, {"body": 1}]
    question = {"prompt": "a \ud83d", "choices": ["b", "\ude42"], "answer": 0}
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("questions.jsonl").write_text(json.dumps(question))
    surrogates = "(such as \\ud83d without its other half): each is read as ?"
    assert main(["perplexity", run, "--data", "rows.jsonl", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["documents"] == 1
    assert told.err.splitlines() == [
        "megapipe: 1 of 4 rows of rows.jsonl is skipped: no field 'text' (data.text_field)",
        f"megapipe: 2 of 4 rows of rows.jsonl are skipped: no text in {FIELD}",
        f"megapipe: 1 lone surrogate in rows.jsonl {surrogates}",
    ]
    assert main(["multiple-choice", run, "--data", "questions.jsonl"]) == 0
    told = capsys.readouterr()
    assert told.err == f"megapipe: 2 lone surrogates in questions.jsonl {surrogates}\n"
    assert main(["perplexity", run, "--text", "a \udcff"]) == 0
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[1:]))
    capsys.readouterr()
    assert main(["perplexity", run, "--data", "rows.jsonl"]) == 3
    assert capsys.readouterr().err == f"megapipe: error: {NO_TEXT}\n"


FIELD = "field 'text' (data.text_field)"
NO_TEXT = (
    "corpus 'rows.jsonl' has no text: 1 of 3 rows has no field 'text', 2 of 3 rows have no text in "
    f"{FIELD}"
)


def test_the_harness_results_are_lines() -> None:
    metrics = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.25, "em,strict": 1.0}
    assert lines_of({"a": {**metrics, "em_stderr,strict": "N/A"}}) == [
        "a: acc 0.5000 +- 0.2500 | em 1.0000 (strict)"
    ]


RUN = "RUN"
MISTAKES: list[tuple[list[str], int, str]] = [
    (["perplexity", RUN], 2, "expected either --data or --text"),
    (["perplexity", RUN, "--text", "a", "--data", "b"], 2, "expected either --data or --text"),
    (["perplexity", RUN, "--text", ""], 3, "1 document without a token to score"),
    (["perplexity", RUN, "--data", "/dev/null"], 3, "/dev/null"),
    (["perplexity", RUN, "--data", "missing.jsonl"], 3, "missing.jsonl"),
    (["perplexity", RUN, "--text", "a", "--stride", "97"], 2, "--stride 97: expected 1 to 96"),
    (["perplexity", RUN, "--text", "a", "--stride", "0"], 2, "--stride 0: expected 1 to 96"),
    (["perplexity", RUN, "--text", "a", "--context", "0"], 2, "--context 0: expected at least 1"),
    (["perplexity", RUN, "--text", "a", "--context", "97"], 2, "--context 97 is longer than"),
    (["perplexity", RUN, "--text", "a", "--batch", "0"], 2, "--batch 0: expected at least 1"),
    (["perplexity", RUN, "--text", "a", "--tokenizer", "no/such/x.json"], 3, "no/such/x.json"),
    (["perplexity", RUN, "--text", "a", "--tp", "2"], 2, "1 process for --tp 2 x --pp 1"),
    (["perplexity", RUN, "--text", "a", "--pp", "0"], 2, "--pp 0: expected at least 1"),
    (["perplexity", RUN, "--text", "a", "--device", "tpu9"], 2, "--device tpu9: "),
    (["perplexity", "no_run", "--text", "a"], 5, "no_run: no such folder"),
    (["perplexity", RUN, "--txt", "a"], 2, "unrecognized arguments: --txt"),
    (["multiple-choice", RUN, "--data", "missing"], 3, "missing: No such file"),
    (["multiple-choice", RUN], 2, "--data"),
    (["harness", RUN, "--tasks", "x", "--limit", "0"], 2, "--limit 0: expected at least 1"),
    (["harness", RUN, "--tasks", "x", "--include-path", "none"], 2, "none: no such folder"),
    (["scores"], 2, "invalid choice: 'scores'"),
]


@pytest.mark.parametrize(("given", "code", "words"), MISTAKES, ids=lambda x: str(x)[:60])
def test_a_mistake_is_one_line(
    given: list[str], code: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if given[0] == "harness":
        pytest.importorskip("lm_eval")
    run = str(folder / "runs/quickstart")
    assert main([run if word == RUN else word for word in given]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("megapipe: error: ")
    assert words in told.err
    assert told.err.count("\n") == 1


def test_sizes_that_ranks_do_not_divide_are_named_by_their_options() -> None:
    from megapipe.errors import ConfigError
    from megapipe.inference.stages import family_for, stages_of

    model = make_config().model
    with pytest.raises(ConfigError, match=r"^model.heads=\d+ is not divisible by --tp 5: "):
        family_for(model, None, context=8, tp=5)
    with pytest.raises(ConfigError, match=r"^5 pipeline stages \(--pp\) for 2 layers"):
        stages_of(family_for(model, None, context=8, tp=1), 5)
