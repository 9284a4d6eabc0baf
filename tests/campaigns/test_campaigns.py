"""A few trials of each campaign, and that a campaign notices what it looks for.

The rest is for ``python tests/campaigns/run.py``.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint import Checkpoint
from tests.campaigns import damage, fuzz, hangs, run
from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.damage import Damages
from tests.campaigns.disk import FAULTS, Disks
from tests.campaigns.fuzz import Fuzz
from tests.campaigns.goodput import Costs, Goodput, expected, measure
from tests.campaigns.hangs import Hangs
from tests.campaigns.kills import Kill, Kills
from tests.campaigns.not_finite import NotFinite
from tests.campaigns.phases import PHASES
from tests.campaigns.preemptions import Preemptions
from tests.campaigns.report import HEAD, replace_figures
from tests.campaigns.resumes import Resumes
from tests.campaigns.runs import LAYOUTS, Layout

SEED = 7


def play(campaign: Campaign[Any], numbers: Iterable[int]) -> list[Record]:
    """Run trials; the first that fails is the test's failure."""
    records = []
    for number in numbers:
        folder = campaign.folder / f"trial-{number}"
        folder.mkdir(parents=True)
        trial = campaign.trial(SEED, number)
        assert str(trial) != repr(trial), "a line says what is done"
        records.append(campaign.run(trial, folder))
    assert all(figure.value for figure in campaign.figures(records))
    return records


@pytest.mark.full
def test_files_that_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reader that looks at no bytes is noticed."""
    campaign = Damages(tmp_path)
    records = play(campaign, range(1, 6))
    assert records[0]["live"]
    records += play(campaign, range(7, 12))
    assert {record["kind"] for record in records} == {"flip", "truncation"}
    monkeypatch.setattr(Checkpoint, "verify", lambda self, files=None, **_: None)
    with pytest.raises(AssertionError, match="is taken"):
        play(campaign, range(12, 20))  # the manifest has a digest of its own, which sees some


@pytest.mark.full
def test_inputs_that_are_mutated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another error than ours is noticed, and memory, and time."""
    records = play(Fuzz(tmp_path), range(40))
    assert {record["outcome"] for record in records} == {"taken", "refused"}

    def fails(error: BaseException) -> None:
        def parse(argv: Sequence[str]) -> None:
            raise error

        monkeypatch.setattr(fuzz.cli, "parse", parse)
        with pytest.raises(type(error)):
            play(Fuzz(tmp_path / type(error).__name__), [0])

    fails(ValueError("of a library"))
    monkeypatch.setattr(fuzz.cli, "parse", lambda argv: bytearray(2 * fuzz.BYTES))
    with pytest.raises(MemoryError):
        play(Fuzz(tmp_path / "memory"), [0])
    monkeypatch.setattr(fuzz.cli, "parse", lambda argv: sum(range(10**8)))
    monkeypatch.setattr(fuzz, "SECONDS", 0.01)
    with pytest.raises(AssertionError, match="it takes"):
        play(Fuzz(tmp_path / "time"), [0])


def test_a_trial_follows_from_its_seed_and_number() -> None:
    campaign = Kills(Path("nowhere"))
    drawn = [campaign.trial(SEED, number) for number in range(100)]
    assert drawn == [Kills(Path("elsewhere")).trial(SEED, number) for number in range(100)]
    assert drawn != [campaign.trial(SEED + 1, number) for number in range(100)]
    inside = [kill for kill in drawn if kill.phase is not None]
    assert len(inside) == 50
    assert len({kill.phase for kill in inside}) > len(PHASES) / 2
    assert len({kill.rank for kill in drawn}) > 4
    assert all(isinstance(kill, Kill) and str(kill) for kill in drawn)


def test_a_live_optimizer_is_asked_to_load_damage_of_each_kind() -> None:
    campaign = Damages(Path("nowhere"))
    period = [campaign.trial(SEED, number) for number in range(damage.PERIOD)]
    assert Counter(trial.kind for trial in period) == {"edit": 1, "truncation": 5, "flip": 50}
    assert [trial.kind for trial in period if trial.is_live] == ["edit", "truncation", "flip"]


def documented() -> dict[str, tuple[int, str]]:
    """Return each campaign's number of trials and its description on the page for users."""
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text(encoding="utf-8")
    table = page.partition("| campaign | trials | what is done")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (.+) \|$", table, re.MULTILINE)
    return {name: (int(trials.replace(",", "")), text) for name, trials, text in rows}


def test_the_document_has_the_trials_of_each_campaign() -> None:
    """The trials of `disk` follow from a save, and are counted in test_disks_that_fail."""
    told = documented()
    assert told.keys() == run.CAMPAIGNS.keys()
    for name, kind in run.CAMPAIGNS.items():
        assert kind is Disks or told[name][0] == kind.full, name
    layouts = {name: re.search(r" in (\d+) layouts", text) for name, (_, text) in told.items()}
    said = {name: int(found[1]) for name, found in layouts.items() if found}
    assert said == {"kills": len(LAYOUTS), "resumes": len(LAYOUTS), "hangs": len(hangs.LAYOUTS)}


def test_each_campaign_has_trials_here() -> None:
    own = Path(__file__).read_text()
    names = [kind.__name__ for kind in run.CAMPAIGNS.values()]
    assert [name for name in names if f"{name}(tmp_path" not in own] == []


@pytest.mark.parametrize("phase", PHASES)
def test_the_functions_of_a_phase_are_there(phase: str) -> None:
    for place in PHASES[phase].functions:
        module, _, names = place.partition(":")
        function = functools.reduce(getattr, names.split("."), importlib.import_module(module))
        assert callable(function)


class Broken(Campaign[int]):
    """Every second trial fails."""

    name = "broken"
    full = 3

    def draw(self, number: int, rng: random.Random) -> int:
        return number

    def run(self, trial: int, folder: Path) -> Record:
        assert trial % 2 == 0, "an odd one"
        return {}

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        return [Figure("even ones", f"{len(records)}")]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.CAMPAIGNS, "broken", Broken)
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    report = tmp_path / "report.md"
    rows = "|---|---|---|---|\n| kills | a | 1 | |\n| broken | b | 2 | |\n"
    report.write_text(f"# A\n\n{HEAD}\n{rows}\nB\n")
    assert run.main(["broken", "--seed", "5", "--report", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "replay: python tests/campaigns/run.py broken --seed 5 --only 1\n" in printed
    assert "an odd one" in printed
    text = report.read_text()
    assert text.startswith("# A\n\n")
    assert text.endswith("|\n\nB\n")
    assert "| kills | a | 1 | |" in text
    assert "| b |" not in text
    assert "| broken | trials that failed | 1 of 3 (missed) | 0 |" in text
    assert "| broken | even ones | 2 |  |" in text
    assert run.main(["broken", "--seed", "5", "--only", "2"]) == 0


def test_a_report_that_is_not_there_is_made(tmp_path: Path) -> None:
    replace_figures(tmp_path / "new.md", {"kills": [Figure("a", "1")]})
    assert (tmp_path / "new.md").read_text().splitlines()[-1] == "| kills | a | 1 |  |"


def test_goodput_is_measured_from_a_log() -> None:
    """Steps of 1 s; a save after each third one takes 0.5 s; a kill costs a step and 7 s."""

    def line(time: float, step: int | None, text: str = "") -> dict[str, Any]:
        return {
            "kind": "note" if step is None else "step",
            "time": time,
            "step": step,
            "text": text,
        }

    log = [line(1, 1), line(2, 2), line(3, 3), line(3.5, None, "saved a"), line(4.5, 4)]
    kill = 5.0
    log += [line(10, None, "resumed from a at step 3 of 9"), line(13, 4), line(14, 5), line(15, 6)]
    log += [line(15.5, None, "saved b"), line(16.5, 7)]
    costs = measure(log, [kill], every=3)
    assert costs == Costs(wall=15.5, steps=6, step=1.0, stall=pytest.approx(0.5), restart=7.0)
    assert costs.goodput == pytest.approx(6 / 15.5)


def test_the_model_of_goodput_is_what_a_simulation_gives() -> None:
    costs = Costs(wall=0.0, steps=0, step=0.0, stall=0.5, restart=8.0)
    draw, between, interval = random.Random(3), 60.0, 5.0
    wall = useful = 0.0
    failure = draw.expovariate(1 / between)
    restarting = False
    while wall < 4e5:
        span = costs.restart if restarting else interval + costs.stall
        if wall + span < failure:
            wall += span
            useful += 0.0 if restarting else interval
            restarting = False
        else:
            wall, restarting = failure, True
            failure = wall + draw.expovariate(1 / between)
    assert expected(costs, between, interval) == pytest.approx(useful / wall, abs=0.01)


@pytest.mark.full
def test_sets_of_files_that_are_edited(tmp_path: Path) -> None:
    """The live optimizer stays as it was."""
    edits = range(0, 3 * damage.PERIOD, damage.PERIOD)
    assert all(record["live"] for record in play(Damages(tmp_path), edits))


@pytest.mark.full
def test_a_rank_that_is_killed_inside_a_save(tmp_path: Path) -> None:
    """Saves are in the background, at four ranks."""
    (record,) = play(Kills(tmp_path), [4])
    assert record["in a save"]


@pytest.mark.full
@pytest.mark.deadline
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """It is stopped by a signal, and the job ends within the seconds that are promised."""
    campaign = Hangs(tmp_path)
    assert campaign.trial(SEED, 0).fault.kind == "stop"
    records = play(campaign, [0])
    assert all(figure.met for figure in campaign.figures(records))


@pytest.mark.slow
def test_a_job_with_a_kill_at_any_time(tmp_path: Path) -> None:
    """One kill comes so soon that the model has nothing to say about it, and the run goes on after
    it."""
    layout = Layout(2, {"parallel.pp": "2"})
    (record,) = play(Goodput(tmp_path, layout=layout, mean_s=1.0, kills=1), [0])
    assert record["kills"] == 1
    assert 0 < record["costs"].goodput < 1
    assert record["costs"].restart > 0


@pytest.mark.slow
def test_a_job_that_is_stopped(tmp_path: Path) -> None:
    play(Preemptions(tmp_path), [1])


@pytest.mark.full
def test_disks_that_fail(tmp_path: Path) -> None:
    """Each operation of a save fails on each rank with each fault, as the document counts them."""
    campaign = Disks(tmp_path)
    play(campaign, [0])
    assert documented()["disk"][0] == len(campaign._places()) * len(FAULTS)


@pytest.mark.full
def test_values_that_are_not_finite(tmp_path: Path) -> None:
    play(NotFinite(tmp_path), [0, 6, 13])


@pytest.mark.full
def test_steps_at_which_a_run_is_resumed(tmp_path: Path) -> None:
    play(Resumes(tmp_path), [2])
