"""Run lint, types and tests, or say how long they took.

Without arguments, all that a change is tested with. A failure stays one: what failed is run once
more, alone, to show whether it fails again, and the exit code stays 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

EPILOG = """
All other arguments go to pytest, which then runs them in one process, after lint and with types
beside it:  scripts/test.sh tests/unit -k schedule
Exit codes: 0 all passed, 1 something failed, 2 a wrong command, 130 Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="scripts/test.sh",
        usage="%(prog)s [option] [arguments of pytest]",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--full",
        action="store_true",
        help="run all that CI runs: also tests marked full, and comparisons with other systems and "
        "exact searches, for which packages are installed",
    )
    what.add_argument(
        "--changed", action="store_true", help="run the tests of what differs from main"
    )
    what.add_argument(
        "--map", action="store_true", help="find out which tests run which lines, for --changed"
    )
    what.add_argument(
        "--times",
        nargs="?",
        const="",
        metavar="FILE",
        help="print where the last whole run spent its time, write docs/decisions/test_times.md, "
        "and all files and tests to FILE (tab-separated values)",
    )
    what.add_argument(
        "--slow",
        nargs="*",
        metavar="FILE",
        help="run the tests marked slow, of all files (the longest not run first) or of these, "
        "and note each result in docs/decisions/slow_tests.md",
    )
    made.add_argument(
        "--list",
        action="store_true",
        help="run nothing: with --changed name the tests, with --slow bring the list of files up "
        "to date",
    )
    made.add_argument("--seed", metavar="SEED", help="draw the cases of drawn tests from SEED")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    commands = parser()
    options, rest = commands.parse_known_args(argv)
    if options.list and options.slow is None and not options.changed:
        commands.error("--list needs --changed or --slow")
    if rest and (options.slow is not None or options.times is not None):
        commands.error(f"unknown arguments: {' '.join(rest)}")
    seed = ["--seed", options.seed] if options.seed is not None else []
    if options.changed:
        from tests.running import changed

        return changed.main([*rest, *seed, *(["--list"] if options.list else [])])
    if options.map:
        from tests.running import coverage_map

        return coverage_map.main(rest)
    if options.times is not None:
        from tests.running import time_report

        return time_report.main(options.times)
    if options.slow is not None:
        from tests.running import slow

        return slow.main(options.slow, only_list=options.list)
    from tests.running import whole_run

    if rest:
        return whole_run.run_some([*rest, *seed], full=options.full)
    return whole_run.run_all(full=options.full, pytest_options=seed)


def end_on(number: signal.Signals) -> None:
    """Have a signal end this process as an exit does, which ends the commands that it has started;
    it stays ignored under nohup."""
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, lambda number, _: sys.exit(128 + number))


if __name__ == "__main__":
    end_on(signal.SIGTERM)
    end_on(signal.SIGHUP)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
