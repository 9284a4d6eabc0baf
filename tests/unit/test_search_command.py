"""``scripts/schedule.py search``: what it prints and where it looks."""

import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from megapipe.errors import ConfigError
from megapipe.schedule.commands import main, parser
from megapipe.schedule.commands.scenario import Scenario, json_number
from megapipe.schedule.commands.search import placements
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import names
from megapipe.schedule.placement import loop, m_shape, vee, wave

SMALL = ("--ranks", "4", "--microbatches", "8")


UNEVEN = [{"F": 1, "I": 1, "W": 1}, {"F": 2, "I": 1, "W": 2}, {"F": 1, "I": 2, "W": 1}]


@pytest.fixture
def uneven(tmp_path):
    path = tmp_path / "uneven.json"
    path.write_text(json.dumps(UNEVEN))
    return ("--ranks", "3", "--microbatches", "5", "--stage-cost", path, "--evaluations", "300")


def test_search(ask, uneven, tmp_path):
    """What it prints is what `simulate` says of the file that it writes."""
    path = tmp_path / "found.csv"
    told = json.loads(ask("search", *uneven, "--activation-limit", "3", "-o", path, "--json"))
    assert (told["schedule"], told["makespan"], told["value"]) == ("searched", 26, 26)
    assert told["lower_bound"] == 26
    assert told["baseline_value"] > 26
    assert told["baseline"] in names()
    assert (told["objective"], told["fits"], told["valid"]) == ("makespan", True, True)
    assert 0 < told["evaluations"] <= 600
    again = json.loads(ask("simulate", path, *uneven[:6], "--activation-limit", "3", "--json"))
    changing = {"schedule", "generate_seconds", "simulate_seconds"}
    assert {key: told[key] for key in again.keys() - changing} == {
        key: again[key] for key in again.keys() - changing
    }


def test_search_by_span_and_weighted_memory(ask, uneven):
    limit = ("--activation-limit", "2", "--freed-by-input-grad", "1")
    held = json.loads(ask("search", *uneven, *limit, "--json"))
    weighted = json.loads(
        ask("search", *uneven, *limit, "--memory-accounting", "weighted", "--json")
    )
    assert max(held["peak_held"]) == 2
    assert max(weighted["peak_weighted"]) == 2
    assert weighted["value"] < held["value"]
    span = json.loads(ask("search", *uneven, "--objective", "span", "--json"))
    assert span["value"] == span["span"]


def test_search_for_a_reader(ask):
    size = ("--ranks", "2", "--microbatches", "2", "--placement", "single", "--evaluations", "9")
    shown = ask("search", *size).splitlines()
    assert re.fullmatch(
        r"  found     makespan 7; (\w+), the best of `list`, 7; none is below 7", shown[-1]
    )


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ((), [loop(4), loop(4, 2), vee(4), wave(4, 2)]),
        (("--chunks", "1"), [loop(4)]),
        (("--chunks", "2"), [loop(4, 2), vee(4)]),
        (("--chunks", "3"), [loop(4, 3)]),
        (("--chunks", "4"), [loop(4, 4), wave(4, 2)]),
        (("--placement", "wave"), [wave(4, 2)]),
        (("--placement", "wave", "--chunks", "2"), [vee(4)]),
        (("--placement", "loop", "--chunks", "3"), [loop(4, 3)]),
        (("--placement", "m"), [m_shape(4)]),
    ],
)
def test_where_search_looks(more, found):
    given = parser().parse_args(["search", *SMALL, *more])
    assert placements(Scenario.of(given)) == found


def test_stage_costs_say_how_many_chunks(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps([{"F": 1, "I": 1, "W": 1}] * 8))
    given = parser().parse_args(["search", *SMALL, "--stage-cost", str(path)])
    assert placements(Scenario.of(given)) == [loop(4, 2), vee(4)]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--placement", "m", "--chunks", "2"), "argument --chunks: --placement m has 6 stages"),
        (("--repetend", "--evaluations", "9"), "argument --evaluations: not with --repetend"),
        (("--repetend", "--objective", "span"), "argument --objective: span cannot be searched"),
        (("--seconds", "9"), "argument --seconds: it needs --repetend"),
    ],
)
def test_arguments_of_the_search_for_a_repetend(capsys, more, told):
    assert main(["search", *SMALL, *more]) != 0
    assert told in capsys.readouterr().err


def test_search_for_a_repetend(ask, tmp_path):
    pytest.importorskip("ortools", reason="the extra `exact` is not installed")
    path = tmp_path / "found.csv"
    size = ("--ranks", "2", "--microbatches", "9", "--placement", "m")
    told = json.loads(ask("search", *size, "-o", path, "--json"))
    assert (told["schedule"], told["placement"], told["valid"]) == ("repetend", "m", True)
    assert (told["period"], told["in_flight"], told["shortest_period"]) == (3, 2, True)
    assert told["value"] == told["makespan"] == json_number(Fraction(82, 3))
    assert told["lower_bound"] == 27
    again = json.loads(ask("simulate", path, *size[:4], "--json"))
    assert again["makespan"] == told["makespan"]
    assert "27.3333; period 3 with 2 micro-batches in flight; none is below 27" in " ".join(
        ask("search", *size).split()
    )


def test_a_model_has_no_times_of_a_stage_on_all_ranks():
    setting = Scenario.of(parser().parse_args(["search", *SMALL, "--placement", "m"]))
    setting = replace(setting, planned=lambda placement: Cost())
    with pytest.raises(ConfigError, match=r"argument --config: it has no times of a stage \(0\)"):
        setting.cost(m_shape(4))
