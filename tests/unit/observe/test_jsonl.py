import contextlib
import json
import resource

import pytest

from megapipe.observe import ValidationRecord
from megapipe.observe.jsonl import JsonlSink
from megapipe.observe.routing_record import RoutingRecord


@contextlib.contextmanager
def largest_file(size):
    """Have writes past ``size`` bytes of a file fail, as on a full disk: in part, then in whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_as_soon_as_it_is_taken(tmp_path, make_record):
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path)
    sink.step(make_record())
    (step,) = read(path)
    assert step["kind"] == "step"
    assert step["time"] > 1e9
    assert (step["step"], step["loss"], step["samples"]) == (7, 2.34567, 224)
    sink.validation(ValidationRecord(step=7, steps=300, loss=2.5, seconds=1.0))
    sink.note('saved "step 7"\nand more')
    assert [line["kind"] for line in read(path)] == ["step", "validation", "note"]
    assert read(path)[2]["text"] == 'saved "step 7"\nand more'
    sink.close()


def test_values_that_json_lacks_are_null(tmp_path, make_record):
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path)
    sink.step(make_record(loss=float("nan"), grad_norm=float("inf"), mfu=None))
    sink.close()
    assert "NaN" not in path.read_text()
    (step,) = read(path)
    assert (step["loss"], step["grad_norm"], step["mfu"]) == (None, None, None)


def test_choices_of_experts_are_there_and_in_no_curve(tmp_path, make_record):
    counts = {1: [8, 0], 3: [4, 4]}
    routing = RoutingRecord(
        1.1, 0.5, 0.0, 2.0, 2, max_load_by_layer={1: 2.0, 3: 1.0}, counts=counts
    )
    record = make_record(routing=routing)
    sink = JsonlSink(tmp_path / "log.jsonl")
    sink.step(record)
    sink.close()
    (step,) = read(tmp_path / "log.jsonl")
    assert step["routing"]["counts"] == {"1": [8, 0], "3": [4, 4]}
    assert step["routing"]["max_load_by_layer"] == {"1": 2.0, "3": 1.0}
    assert step["routing"]["aux_loss"] == 1.1
    curves = {name for name in record.metrics() if name.startswith("experts/")}
    told = ("aux_loss", "z_loss", "dropped_fraction", "max_load", "idle_experts")
    assert curves == {f"experts/{name}" for name in told}


def test_a_resumed_run_appends(tmp_path, make_record):
    path = tmp_path / "log.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.step(make_record(step=step))
        sink.close()
    assert [line["step"] for line in read(path)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"kind": "st', "x" * 3000])
def test_what_a_killed_run_left_of_a_line_is_cut_off(tmp_path, make_record, torn):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "note", "text": "whole"}\n' + torn)
    sink = JsonlSink(path)
    sink.step(make_record())
    sink.close()
    assert [line["kind"] for line in read(path)] == ["note", "step"]


def test_a_log_longer_than_one_read_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = (json.dumps({"text": "x" * 990}) + "\n") * 1500
    path.write_text(whole + "{torn")
    JsonlSink(path).close()
    assert path.read_text() == whole


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on_after_it(tmp_path, make_record):
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path)
    sink.step(make_record(step=1))
    size = path.stat().st_size
    with largest_file(size + 10), pytest.raises(OSError, match="No space left"):
        sink.step(make_record(step=2))
    with largest_file(size), pytest.raises(OSError, match="File too large"):
        sink.step(make_record(step=3))
    assert path.stat().st_size == size
    sink.step(make_record(step=4))
    sink.close()
    assert [line["step"] for line in read(path)] == [1, 4]
