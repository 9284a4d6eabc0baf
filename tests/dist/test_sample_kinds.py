"""Runs on examples, and on documents that are rearranged to fill in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity import chats
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

pytestmark = pytest.mark.full


def examples(folder: Path) -> dict[str, str]:
    """Write conversations, and prompts with completions; one in ten is longer than a sample."""
    rows: list[dict[str, Any]] = []
    for i in range(60):
        answer = "ten" * (60 if i % 10 == 3 else 1 + i % 4)
        talk = chats.conversation(f"What is {i}?", answer, "Sure?", "Yes.")
        rows.append({"messages": talk} if i % 2 else {"prompt": f"{i}: ", "completion": answer})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "chat.jinja").write_text(chats.CHATML)
    return {
        "data.source": str(folder / "rows.jsonl"),
        "data.sample_format": "supervised",
        "data.chat_template": str(folder / "chat.jinja"),
        "train.sequence_length": "64",
        "data.validation_fraction": "0.3",
    }


def fim(folder: Path) -> dict[str, str]:
    """Write texts, and return settings that rearrange half of them. The marks are those of a
    template: any token that is added to those of texts will do."""
    (folder / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"the house {i} and the mouse"}) for i in range(60))
    )
    return {
        "data.source": str(folder / "texts.jsonl"),
        "data.sample_format": "packed",
        "data.fim_rate": "0.5",
        "data.fim_tokens": "[<|im_start|>, <|begin_of_text|>, <|im_end|>]",
        "train.sequence_length": "32",
    }


@pytest.mark.parametrize("kind", [examples, fim])
def test_two_processes(kind: Any, tmp_path: Path) -> None:
    chats.tokenizer().save(str(tmp_path / "tokenizer.json"))
    given = {**tiny(tmp_path), **kind(tmp_path), "data.tokenizer": str(tmp_path / "tokenizer.json")}
    given |= {"train.steps": "12", "optimizer.lr": "0.02", "log.sample_ids": "true"}
    outcome = run_forked(tmp_path, 2, *arguments(given), "parallel.pp=2")
    assert set(outcome.codes) == {0}, outcome.text
    lines = (tmp_path / "runs/run/log.jsonl").read_text().splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["kind"] in ("step", "validation")]
    assert len(losses) == 13
    assert losses[-1] < losses[0] - 0.5, "validation after training"
    assert outcome.text.count("of 60 examples are skipped") == (kind is examples)
