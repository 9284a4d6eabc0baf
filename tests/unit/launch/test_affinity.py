"""A process is kept to the processors near its GPU, unless somebody has chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megapipe.launch.affinity import bind_near

PCI = "0000:dc:00.0"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[set[int]]]:
    """Fake a machine of 16 processors; return its devices and the affinities that are set."""
    devices = tmp_path / "bus" / "pci" / "devices"
    (devices / PCI).mkdir(parents=True)
    cpu = tmp_path / "devices" / "system" / "cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-15\n")
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: asked.append(set(cpus)))
    return devices, asked


def test_those_near_are_taken(system: tuple[Path, list[set[int]]]) -> None:
    devices, asked = system
    (devices / PCI / "local_cpulist").write_text("4-7,12-14,15\n")
    near = {4, 5, 6, 7, 12, 13, 14, 15}
    assert bind_near(PCI, devices) == near
    assert asked == [near]


@pytest.mark.parametrize("text", ["0-15\n", "\n", "32-47\n", None])
def test_nothing_is_done_where_it_would_change_nothing(
    system: tuple[Path, list[set[int]]], text: str | None
) -> None:
    devices, asked = system
    if text is not None:
        (devices / PCI / "local_cpulist").write_text(text)
    assert not bind_near(PCI, devices)
    assert not asked


def test_a_choice_stays(
    system: tuple[Path, list[set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, asked = system
    (devices / PCI / "local_cpulist").write_text("4-7\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4})
    assert not bind_near(PCI, devices)
    assert not asked
