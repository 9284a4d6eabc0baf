"""A plugin of pytest that runs the tests that a file names, a name a line.

On a command line, cases that are gone would be errors, and thousands of names too many.
"""

from pathlib import Path

import pytest

from tests.running.coverage_records import function_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the plugin."""
    parser.addoption("--selected", type=Path, required=True, help="a file with names of tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all other tests."""
    names = {*config.getoption("selected").read_text(encoding="utf-8").splitlines()}
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if {item.nodeid, function_of(item.nodeid)} & names else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept
