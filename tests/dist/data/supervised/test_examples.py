"""Examples that several processes read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.data.supervised import prepare_examples
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import DataError
from tests.parity.chats import CHATML
from tests.parity.supervised_rows import chat, in_other_files, rows_of_all_sizes, settings

BYTE = ByteTokenizer()


@pytest.mark.full
def test_several_processes_and_saved_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    from megapipe.data.corpus import corpus_shards

    rows = rows_of_all_sizes()
    config = settings(tmp_path, rows, CHATML, tokenizer_workers=2)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    in_other_files(config, tmp_path, "saved")
    for name, value in (("PART", 600), ("MOST_PARTS", 10**6)):
        monkeypatch.setattr(corpus_shards, name, value)
    assert len([*corpus_shards.parts(config)]) > 5
    in_other_files(config, tmp_path, "rows.jsonl")
    config = settings(
        tmp_path, [*rows[:35], chat("a question alone"), *rows], CHATML, tokenizer_workers=2
    )
    with pytest.raises(DataError, match=r"rows\.jsonl: line 36: .* has no message of role 'assis"):
        prepare_examples(config, BYTE, progress=False)
