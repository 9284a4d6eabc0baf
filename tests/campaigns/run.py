"""Runs campaigns: ``python tests/campaigns/run.py [NAME ...]``; without a name, all of them.

Each trial is drawn from the seed and its number. One that fails is followed by the command that
replays it alone, and its files stay. Exit code 1 where a trial fails or a figure misses its target.
With --report the figures of these campaigns take the place of theirs in a table of FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded: as jobs have it
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.damage import Damages
from tests.campaigns.disk import Disks
from tests.campaigns.fuzz import Fuzz
from tests.campaigns.goodput import Goodput
from tests.campaigns.hangs import Hangs
from tests.campaigns.kills import Kills
from tests.campaigns.not_finite import NotFinite
from tests.campaigns.preemptions import Preemptions
from tests.campaigns.report import replace_figures
from tests.campaigns.resumes import Resumes

CAMPAIGNS: dict[str, type[Campaign[Any]]] = {
    kind.name: kind
    for kind in (Kills, Hangs, Damages, Preemptions, Disks, NotFinite, Resumes, Fuzz, Goodput)
}
QUIET_S = 5.0
"""Seconds between two lines of progress, if trials take less."""


def run(campaign: Campaign[Any], seed: int, numbers: range) -> tuple[list[Record], int]:
    """Run trials; return the records of those that pass, and how many fail."""
    records: list[Record] = []
    failed, began, told = 0, time.monotonic(), 0.0
    for count, number in enumerate(numbers, 1):
        trial = campaign.trial(seed, number)
        folder = campaign.folder / f"trial-{number}"
        folder.mkdir(parents=True)
        try:
            records.append(campaign.run(trial, folder))
            shutil.rmtree(folder)
            verdict, more = "ok", ""
        except Exception:
            failed += 1
            verdict = "FAILED"
            replay = f"{campaign.name} --seed {seed} --only {number}"
            more = f"\n{traceback.format_exc()}files: {folder}\n"
            more += f"replay: python tests/campaigns/run.py {replay}"
        now = time.monotonic()
        if verdict != "ok" or now - told > QUIET_S or count == len(numbers):
            told, left = now, (now - began) / count * (len(numbers) - count)
            at = f"{campaign.name} {count}/{len(numbers)}"
            print(f"{at}: {trial}: {verdict}; {left / 60:.1f} min left{more}", flush=True)
    return records, failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--count", type=int, help="trials (default: those of the full campaign)")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run the trial of this number")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - CAMPAIGNS.keys():
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(CAMPAIGNS)}")
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="campaigns-"))
    found: dict[str, list[Figure]] = {}
    failures = missed = 0
    for name in given.names or CAMPAIGNS:
        folder = root / name
        folder.mkdir()
        campaign = CAMPAIGNS[name](folder)
        numbers = range(given.count or campaign.full)
        if given.only is not None:
            numbers = range(given.only, given.only + 1)
        began = time.monotonic()
        records, failed = run(campaign, seed, numbers)
        figures = [Figure("trials that failed", f"{failed} of {len(numbers)}", "0", failed == 0)]
        figures += campaign.figures(records) if records else []
        seconds = time.monotonic() - began
        figures.append(Figure("seed; minutes it took", f"{seed}; {seconds / 60:.1f}"))
        for figure in figures:
            target = f" (target {figure.target})" if figure.target else ""
            print(f"{name}: {figure.what}: {figure.value}{target}{'' if figure.met else ' MISSED'}")
        found[name] = figures
        failures, missed = failures + failed, missed + sum(not each.met for each in figures)
    if given.report is not None:
        replace_figures(given.report, found)
    if not failures:
        shutil.rmtree(root)
    return int(failures + missed > 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
