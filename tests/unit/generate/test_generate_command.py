"""The command: prompts from everywhere, each form of output, and what it says of mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.generate import Generator, Sampling, TokenOutput, find_checkpoint
from megapipe.generate.command import in_order, main, read_prompts
from megapipe.inference import load_model
from tests.unit.generate.checkpoints import make_config, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write(folder, make_config(dtype="fp32"))
    return folder


def test_prompts_of_a_file_and_of_arguments_in_every_form_of_output(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"two\r\n\nfour\x0c\xff\n")
    given = [
        str(run),
        "--prompt",
        "one",
        "--prompts",
        str(file),
        "--max-new-tokens",
        "3",
        "--top-k",
        "2",
    ]
    prompts = ["one", "two", "", "four\x0c\ufffd"]
    assert main([*given, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in told] == prompts
    generator = Generator(load_model(find_checkpoint(run), torch.device("cpu")))
    texts = [""] * 4
    for piece in generator.generate(prompts, Sampling(tokens=3, top_k=2)):
        texts[piece.prompt] += piece.text
    assert [each["text"] for each in told] == texts
    assert {each["end"] for each in told} <= {"tokens", "document"}
    assert main(given) == 0
    shown = "".join(
        f"--- {i} of 4 ---\n{prompt}{text}\n"
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1)
    )
    assert capsys.readouterr().out == shown
    assert main([*given, "--line"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_each_option_reaches_the_choices(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator(load_model(find_checkpoint(run), torch.device("cpu")))

    def written(*given: str) -> tuple[str, str]:
        assert main([str(run), "--prompt", "x", "--max-new-tokens", "20", "--json", *given]) == 0
        told = json.loads(capsys.readouterr().out)
        return told["text"], told["end"]

    def wanted(**given: Any) -> tuple[str, str | None]:
        pieces = list(generator.generate(["x"], Sampling(tokens=20, **given)))
        return "".join(piece.text for piece in pieces), pieces[-1].end

    usual = wanted()
    for option, value in (("seed", 5), ("temperature", 3.0), ("top_p", 0.3)):
        name = f"--{option.replace('_', '-')}"
        assert written(name, str(value)) == wanted(**{option: value}) != usual, name
    stops = usual[0][9], usual[0][6:8]
    assert written("--stop", stops[0], "--stop", stops[1]) == wanted(stop=stops) != usual
    seed = next(seed for seed in range(99) if "\n" in wanted(seed=seed)[0])
    of_a_line = written("--seed", str(seed), "--stop", "\\n")
    assert of_a_line == (wanted(seed=seed)[0].partition("\n")[0], "stop")


def test_standard_input_and_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\nb")))
    assert read_prompts(["0"], "-") == ["0", "a", "", "b"]
    assert read_prompts(None, None) == [""]


def test_pieces_are_shown_prompt_after_prompt_as_early_as_can_be() -> None:
    taken = []

    def pieces():  # type: ignore[no-untyped-def]
        for each in ("1b0", "0a0", "0c0", "1d1", "2e1", "0f1"):
            taken.append(each)
            yield TokenOutput(int(each[0]), 0, each[1], "tokens" if each[2] == "1" else None)

    shown = [(number, text, len(taken)) for number, text, _ in in_order(pieces(), 3)]
    assert shown == [(0, "a", 2), (0, "c", 3), (0, "f", 6), (1, "b", 6), (1, "d", 6), (2, "e", 6)]


@pytest.mark.parametrize(
    ("given", "code", "line"),
    [
        (["--top-p", "0"], 2, "--top-p 0.0: expected above 0, at most 1"),
        (["--stop", "a", "--stop", ""], 2, "--stop '': expected a text that is not empty"),
        (["--device", "tpu9000"], 2, "--device tpu9000: "),
        (["--prompts", "missing"], 3, "--prompts missing: No such file or directory"),
        (["--prompts", "/dev/null"], 3, "--prompts /dev/null is empty"),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, given: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *given]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"megapipe: error: {line}")
    assert told.err.count("\n") == 1


def test_a_model_whose_experts_have_a_capacity_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, make_config(moe={"num_experts": 4, "capacity_factor": 1.5}))
    assert main([str(tmp_path), "--prompt", "one"]) == 2
    line, *others = capsys.readouterr().err.splitlines()
    assert others == []
    assert line.startswith(
        "megapipe: error: model.moe.capacity_factor=1.5: the capacity of an expert"
    )


def test_a_prompt_that_the_model_cannot_see_whole_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--prompt", "0123456", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert main([str(run), "--prompt", "01234567", "--max-new-tokens", "1"]) == 0
    assert "prompt 1 has 9 tokens" in capsys.readouterr().err
