"""Choosing among kernels: order, reasons, errors, warnings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.ops.probe import Candidate, Mismatch, Unavailable, agree, choose_kernel, load_module
from tests.unit.ops.fakes import install


def missing() -> str:
    raise Unavailable("not installed")


def wrong(kernel: str) -> None:
    raise Mismatch(f"{kernel} is 3 off")


def broken(kernel: str) -> None:
    raise RuntimeError("no kernel image\nis available")


GOOD = Candidate("good", lambda: "good kernel")
ABSENT = Candidate("absent", missing)
LACKING = Candidate("lacking", missing)
WRONG = Candidate("wrong", lambda: "kernel", wrong)
BROKEN = Candidate("broken", lambda: "kernel", broken)


def test_auto_takes_the_first_usable() -> None:
    choice = choose_kernel("norm", "auto", [ABSENT, LACKING, GOOD])
    assert choice.kernel == "good kernel"
    assert str(choice) == "norm good (absent, lacking: not installed)"
    assert not choice.warnings
    assert str(choose_kernel("norm", "auto", [GOOD, WRONG])) == "norm good"


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (WRONG, "wrong: kernel is 3 off"),
        (BROKEN, "broken: fails its self-check: no kernel image"),
    ],
)
def test_auto_warns_of_a_kernel_that_is_wrong(candidate: Candidate[str], said: str) -> None:
    choice = choose_kernel("norm", "auto", [candidate, GOOD])
    assert choice.kernel == "good kernel"
    assert choice.why == said
    (warning,) = choice.warnings
    assert warning == f"kernels.only.norm: {candidate.name} is not used: {said.partition(': ')[2]}"


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (ABSENT, "kernels.only.norm=absent: not installed; expected auto"),
        (WRONG, "kernels.only.norm=wrong: kernel is 3 off; expected auto"),
        (BROKEN, "kernels.only.norm=broken: fails its self-check: no kernel image; expected auto"),
    ],
)
def test_asking_by_name_is_an_error(candidate: Candidate[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_kernel("norm", candidate.name, [candidate, GOOD])
    assert str(error.value) == said


def test_by_name() -> None:
    assert str(choose_kernel("norm", "good", [WRONG, GOOD])) == "norm good (as configured)"


def test_the_version_is_told() -> None:
    numbered = Candidate("good", lambda: "kernel", package="pytest")
    built_here = Candidate("good", lambda: "kernel", package="no-such-distribution")
    assert str(choose_kernel("norm", "auto", [numbered])) == f"norm good {pytest.__version__}"
    assert str(choose_kernel("norm", "auto", [built_here])) == "norm good"


def test_the_unrelated_package_called_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex")
    with pytest.raises(Unavailable, match=r"NVIDIA apex is not installed \(no module amp_C\)"):
        load_module("amp_C", "NVIDIA apex")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "broken_x does not load: undefined"),
        ("raise OSError('libcudart.so.11.0: no such file')", "broken_x does not load: libcudart"),
        ("import no_such_dependency", "broken_x needs no_such_dependency, which is not installed"),
    ],
)
def test_an_extension_that_does_not_load(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_x.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unavailable, match=said):
        load_module("broken_x", "x")
    assert "broken_x" not in sys.modules


def test_missing_parts_of_a_package() -> None:
    for name in ("no_such_package", "no_such_package.part", "megapipe.no_such_part"):
        with pytest.raises(Unavailable, match=r"x is not installed \(no module "):
            load_module(name, "x")


def results(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(3, dtype=dtype), torch.full((2,), scale, dtype=dtype)]


def test_agreement() -> None:
    agree(1.0, 1.0, results, torch.float32)
    agree(1.0 + 3e-7, 1.0, results, torch.float32)
    for off in (1.0 + 6e-7, 0.5, float("nan"), float("inf")):
        with pytest.raises(Mismatch, match=r"result 1 of its self-check is .* off, at most"):
            agree(off, 1.0, results, torch.float32)
    agree(1.02, 1.0, results, torch.bfloat16)
    with pytest.raises(Mismatch, match=r"result 0 has shape \[2\], not \[3\]"):
        agree(2, 3, lambda n, dtype: [torch.zeros(n, dtype=dtype)], torch.float32)
