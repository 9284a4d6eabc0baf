"""What the launcher's options for nodes may say."""

import pytest

from megapipe.launch import launcher
from megapipe.launch.endpoints import Endpoint, NodeRange


def test_endpoints() -> None:
    assert Endpoint.read("node0:29400") == [Endpoint("node0", 29400)]
    assert Endpoint.read("a:1, [::1]:65535") == [Endpoint("a", 1), Endpoint("::1", 65535)]


@pytest.mark.parametrize(
    "text", ["", "node0", "node0:", ":1", "a:0", "a:65536", "a:b", "a:1,", "a..b:1"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Endpoint.read(text)


def test_numbers_of_nodes() -> None:
    assert NodeRange.read("4") == NodeRange(4, 4)
    assert NodeRange.read("2:4") == NodeRange(2, 4)
    assert NodeRange.read("2:4").elastic
    assert not NodeRange.read("3:3").elastic
    assert [str(NodeRange.read(text)) for text in ("4", "2:4", "3:3")] == ["4", "2:4", "3"]


@pytest.mark.parametrize("text", ["", "0", "-1", "0:2", "3:2", "2:", "1:2:3", "many"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011, int's own
        NodeRange.read(text)


@pytest.mark.parametrize(("told", "options"), [("2", []), ("1:3", ["--nproc", "1"])])
def test_a_number_of_nodes_that_torchrun_alone_reads(
    told: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher of each pod would start a job of its own."""
    monkeypatch.setenv("PET_NNODES", told)
    with pytest.raises(SystemExit) as caught:
        launcher._parse([*options, "train.py"])
    assert caught.value.code == 2
    assert f"PET_NNODES={told} is ignored: expected --nnodes {told}, or" in capsys.readouterr().err
    assert launcher._parse([*options, "--nnodes=1", "train.py"])[1] == ["train.py"]
    monkeypatch.setenv("PET_NNODES", "1")
    assert launcher._parse([*options, "train.py"])[1] == ["train.py"]
