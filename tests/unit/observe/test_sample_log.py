"""Which samples each step took, as starts of a run have logged it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.errors import ConfigError, DataError
from megapipe.observe.sample_log import (
    LoggedSample,
    SampleWriter,
    check,
    main,
    new_start,
    read_samples,
)


def log(folder: Path, after: int, *ranks: dict[int, list[int]], source: str = "") -> Path:
    """Log a start whose processes take sample numbers by step; samples are numbers modulo 10."""
    start = new_start(folder, after)
    for rank, steps in enumerate(ranks):
        writer = SampleWriter(start, rank)
        for step, numbers in steps.items():
            writer.step(step, [LoggedSample(n, source, n, n % 10) for n in numbers])
        writer.close()
    return start


def numbers(folder: Path) -> dict[int, list[int]]:
    return {
        step: [taken.number for taken in samples]
        for step, samples in read_samples(folder).steps.items()
    }


def test_what_a_later_start_did_again_counts(tmp_path: Path) -> None:
    """Killed within step 4, which one process logged; then with another batch and layout."""
    log(tmp_path, 0, {1: [0, 1], 2: [4, 5], 3: [8, 9], 4: [12, 13]}, {1: [2, 3], 2: [6, 7]})
    second = log(tmp_path, 2, {3: [8, 9, 10], 4: [11, 12, 13]})
    assert second.name == "002-after-2"
    assert numbers(tmp_path) == {
        1: [0, 1, 2, 3],
        2: [4, 5, 6, 7],
        3: [8, 9, 10],
        4: [11, 12, 13],
    }
    assert check(read_samples(tmp_path)) == [
        "steps 1 to 4 took samples 0 to 13 of the run, each once and in order",
        "source: 14 samples, 10 different ones, each 1 to 2 times",
    ]


def test_a_step_that_a_kill_has_cut_off_is_no_gap(tmp_path: Path) -> None:
    """Two replicas, the second of which was killed before its last line; a resume closes that. A
    process that goes on without another for long is no kill."""
    log(tmp_path, 0, {1: [0, 1], 2: [4, 5], 3: [8, 9]}, {1: [2, 3], 2: [6, 7]}, {})
    taken, _, unfinished = check(read_samples(tmp_path))
    assert taken == "steps 1 to 2 took samples 0 to 7 of the run, each once and in order"
    assert unfinished.startswith(
        "step 3 is unfinished, because not all processes have logged it: it"
    )
    log(tmp_path, 2, {3: [8, 9]}, {3: [10, 11]})
    assert check(read_samples(tmp_path))[0].startswith("steps 1 to 3 took samples 0 to 11 ")
    log(tmp_path, 3, {4: [14, 15], 5: [18, 19], 6: [22, 23], 7: [26, 27]}, {4: [12, 13]})
    with pytest.raises(DataError, match="step 5 took sample 18 where 16 was next"):
        check(read_samples(tmp_path))


def test_draws_of_a_source_have_no_gaps(tmp_path: Path) -> None:
    """Numbers of the run alone would not tell."""
    writer = SampleWriter(new_start(tmp_path, 0), 0)
    writer.step(
        1, [LoggedSample(0, "a", 0, 3), LoggedSample(1, "b", 0, 8), LoggedSample(2, "a", 1, 5)]
    )
    writer.step(2, [LoggedSample(3, "b", 1, 2), LoggedSample(4, "a", 3, 1)])
    writer.close()
    with pytest.raises(DataError, match="step 2 took number 3 of source a where 2 was next"):
        check(read_samples(tmp_path))


def test_data_that_begin_anew_are_counted_anew(tmp_path: Path) -> None:
    log(tmp_path, 0, {1: [0, 1], 2: [2, 3]})
    log(tmp_path, 2, {3: [0, 1], 4: [2, 3]})
    lines = check(read_samples(tmp_path))
    assert lines[0] == "steps 3 to 4 took samples 0 to 3 of the run, each once and in order"


def test_a_line_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    start = log(tmp_path, 0, {1: [0], 2: [1]})
    path = start / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert numbers(tmp_path) == {1: [0]}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({1: [0, 1], 3: [2, 3]}, "step 2 is missing"),
        ({1: [0, 1], 2: [3, 4]}, "step 2 took sample 3 where 2 was next"),
        ({1: [0, 1], 2: [1, 2]}, "step 2 took sample 1 where 2 was next"),
        ({1: [0, 0]}, "step 1 took sample 0 where 1 was next"),
    ],
)
def test_what_is_not_exactly_once_is_found(
    tmp_path: Path, steps: dict[int, list[int]], words: str
) -> None:
    log(tmp_path, 0, steps)
    with pytest.raises(DataError, match=words):
        check(read_samples(tmp_path))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no sample log: expected a run with log.sample_ids" in capsys.readouterr().err
    start = log(tmp_path, 0, {1: [0, 1]}, source="web")
    assert main([str(tmp_path)]) == 0
    assert "web: 2 samples, 2 different ones, each once" in capsys.readouterr().out
    (start / "rank-00000.jsonl").write_text("{}\n")
    assert main([str(tmp_path)]) == 3
    assert "rank-00000.jsonl:1: not a line of log.sample_ids" in capsys.readouterr().err
    assert main([]) == 2


def test_nothing_is_logged(tmp_path: Path) -> None:
    new_start(tmp_path, 0)
    with pytest.raises(ConfigError, match="has no sample log"):
        read_samples(tmp_path)


def test_what_is_left_out_is_no_gap(tmp_path: Path) -> None:
    """A run that went back in step 3, and has begun a folder for what follows step 1."""
    log(tmp_path, 0, {1: [0, 1], 2: [2, 3]})
    start = log(tmp_path, 1, {2: [2, 3], 3: [6, 7]})
    with pytest.raises(DataError, match="step 3 took sample 6 where 4 was next"):
        check(read_samples(tmp_path))
    writer = SampleWriter(start, 0)
    writer.skipped_samples([LoggedSample(4, "", 4, 4)])
    with pytest.raises(DataError, match="step 3 took sample 6 where 5 was next"):
        check(read_samples(tmp_path))
    writer.skipped_samples([LoggedSample(5, "", 5, 5), LoggedSample(40, "", 40, 0)])
    writer.close()
    assert check(read_samples(tmp_path)) == [
        "steps 1 to 3 took samples 0 to 7 of the run, each once and in order",
        "skipped: 2 samples, 4 to 5",
        "source: 6 samples, 6 different ones, each once",
    ]


def test_a_sample_that_was_left_out_and_taken_is_told(tmp_path: Path) -> None:
    start = log(tmp_path, 0, {1: [0, 1], 2: [2, 3]})
    writer = SampleWriter(start, 0)
    writer.skipped_samples([LoggedSample(2, "", 2, 2)])
    writer.close()
    with pytest.raises(DataError, match="step 2 took sample 2 where 3 was next"):
        check(read_samples(tmp_path))


def test_a_log_of_before_is_read(tmp_path: Path) -> None:
    """Skipped samples had another name in it."""
    start = log(tmp_path, 0, {1: [0, 1], 2: [3, 4]})
    with (start / "rank-00000.jsonl").open("a") as file:
        file.write('{"left_out":[[2,"",2,2]]}\n')
    assert read_samples(tmp_path).skipped_samples.keys() == {2}
    assert "1 sample, 2" in check(read_samples(tmp_path))[1]
