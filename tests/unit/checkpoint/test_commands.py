"""scripts/checkpoint.py: what is listed, read, shown, compared and removed."""

import re

import pytest
import torch

from megapipe.checkpoint import Checkpoint, Meta, SingleProcess, save
from megapipe.checkpoint.commands import main
from megapipe.checkpoint.names import REMOVED
from megapipe.checkpoint.run_lock import RunLock
from tests.unit.checkpoint.checkpoint_worlds import META, dim_cut, flat_cut, save_alone, tensors


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def out_of(capsys, *argv, code=0):
    found = main([str(word) for word in argv])
    said = capsys.readouterr()
    assert found == code, said.err
    assert said.err.count("\n") == bool(code)
    return said.out + said.err


def save_state(root, state, step=1, **meta):
    facts = Meta(**{**vars(META), **meta})
    return save(root, step=step, pieces=flat_cut(state, 0, 1), meta=facts, group=SingleProcess())


def test_the_list_shows_all_and_what_is_wrong_with_them(tmp_path, capsys):
    root = tmp_path / "checkpoints"
    paths = [save_alone(root, step) for step in (1, 2, 10)]
    (paths[1] / "00000-0000.safetensors").unlink()
    (root / ".staging-00000011-abc").mkdir()
    for folder in (tmp_path, root):
        lines = out_of(capsys, "list", folder).splitlines()
        assert lines[0] == f"{root}: 3 checkpoints"
        assert [line.split()[0] for line in lines[1:4]] == [path.name for path in paths]
        assert lines[1].endswith("dp 1, tp 1  intact")
        assert "damaged: cannot read" in lines[2]
        assert lines[4] == "latest names step-00000010"
        assert lines[5].startswith(".staging-00000011-abc: being written")
    (root / "latest").write_text("step-00000099\n")
    assert "names step-00000099, which does not exist" in out_of(capsys, "list", root)


def test_the_list_tells_weights_alone_from_what_a_run_can_go_on_from(tmp_path, capsys):
    save_state(tmp_path, tensors())
    save_state(tmp_path, {k: v for k, v in tensors().items() if k.startswith("model/")}, step=2)
    lines = out_of(capsys, "list", tmp_path).splitlines()
    assert [line.partition("tp 1")[2].strip() for line in lines[1:3]] == [
        "intact",
        "intact, weights only",
    ]


def test_verify_reads_every_byte_of_all(tmp_path, capsys):
    paths = [save_alone(tmp_path, step) for step in (1, 2, 3)]
    assert out_of(capsys, "verify", tmp_path).count(": intact, 1 file") == 3
    flip(paths[1] / "00000-0000.safetensors")
    text = out_of(capsys, "verify", tmp_path, paths[1], code=5)
    assert text.count(": intact, 1 file") == 2
    assert text.count(f"{paths[1]}: DAMAGED: ") == 2
    assert "2 of 4 checkpoints cannot be used" in text


def test_verify_finds_values_that_are_not_finite(tmp_path, capsys):
    sound = {name: x.nan_to_num(0, 0) for name, x in tensors().items()}
    out_of(capsys, "verify", save_state(tmp_path, sound), "--values")
    name = "model/embedding.word.weight"
    text = out_of(capsys, "verify", save_state(tmp_path, tensors()), "--values", code=5)
    assert f"{name} has 2 values of 288 that are not finite" in text


def test_inspect_shows_the_newest_of_a_run(tmp_path, capsys):
    save_alone(tmp_path / "checkpoints", 1)
    path = save_alone(tmp_path / "checkpoints", 7)
    text = out_of(capsys, "inspect", tmp_path)
    assert f"{path}: step 7 of run a-run\n" in text
    assert "samples: 320\n" in text
    assert "model: 1 tensor, 288 values in fp32\n" in text
    keys = out_of(capsys, "inspect", path, "--config").splitlines()
    assert keys == [
        "model.layers=2",
        "pipeline.stage_layout=[1, 2]",
        "run.name=ä",
        "x=null",
        "y=true",
    ]
    lines = out_of(capsys, "inspect", path, "--tensors", "model/*").splitlines()
    assert [line.split(" ")[0] for line in lines] == sorted(n for n in tensors() if "model" in n)
    assert lines[0].endswith(", 2 not finite")
    found = re.search(r"\[12\] fp64: (\S+) to (\S+), rms (\S+)$", lines[1])
    values = tensors()["model/final_norm.weight"]
    wanted = [values.min(), values.max(), values.square().mean().sqrt()]
    assert [float(x) for x in found.groups()] == pytest.approx([x.item() for x in wanted], 1e-5)
    assert "no name matches" in out_of(capsys, "inspect", path, "--tensors", "q", code=2)


def test_diff_sees_through_layouts_and_shows_every_difference(tmp_path, capsys):
    one = save_state(tmp_path / "a" / "checkpoints", tensors())
    other = save(
        tmp_path / "b", step=1, pieces=dim_cut(0)(tensors(), 0, 1), meta=META, group=SingleProcess()
    )
    assert "7 of 7 tensors are bitwise equal" in out_of(capsys, "diff", one, other, "--equal")
    state = tensors()
    state["model/final_norm.weight"][3] += 0.5
    state["optimizer.exp_avg/final_norm.weight"][0] = torch.nan
    del state["optimizer.step/count"]
    other = save_state(tmp_path / "c", state, config={**META.config, "model.layers": 3, "z": 1})
    text = out_of(capsys, "diff", tmp_path / "a", other)
    assert "config model.layers: 2 | 3\n" in text
    assert "config z: (absent) | 1\n" in text
    norm = tensors()["model/final_norm.weight"].norm().item()
    assert f"model/final_norm.weight: at most 0.5, norm {0.5 / norm:.3g} of A's\n" in text
    assert "optimizer.exp_avg/final_norm.weight: at most 0, norm 0 of A's, 1 values not" in text
    assert "optimizer.step/count: only in A\n" in text
    assert "4 of 7 tensors are bitwise equal" in text
    assert "differ in 3 tensors" in out_of(capsys, "diff", one, other, "--equal", code=5)
    same = out_of(capsys, "diff", one, other, "--only", "model/*emb*", "--equal")
    assert "1 of 1 tensors are bitwise equal" in same


@pytest.mark.parametrize("command", ["list", "verify", "inspect"])
def test_a_folder_without_checkpoints_is_said(tmp_path, capsys, command):
    for folder in (tmp_path, tmp_path / "gone"):
        assert str(folder) in out_of(capsys, command, folder, code=5)


def test_checkpoints_stay_as_they_were(tmp_path, capsys):
    path = save_alone(tmp_path, 1)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    for command in (["list", tmp_path], ["verify", path, "--values"], ["diff", path, path]):
        main([str(word) for word in command])
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    Checkpoint.open(path).verify()


def names(root):
    apart = (REMOVED, ".lock")
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(apart))


def test_delete_leaves_a_sound_one_and_moves_the_pointer(tmp_path, capsys):
    root = tmp_path / "checkpoints"
    for step in (1, 2, 2, 3):
        save_alone(root, step)
    (root / "step-00000001" / "00000-0000.safetensors").unlink()
    text = out_of(capsys, "delete", tmp_path, "2", "step-00000003", code=2)
    assert "this would delete the last intact checkpoint" in text
    text = out_of(capsys, "delete", tmp_path, "step-00000002", "step-00000003")
    assert text.count("removed ") == 2
    assert "latest now names step-00000002.1" in text
    assert names(root) == ["latest", "step-00000001", "step-00000002.1"]
    assert (root / "latest").read_text() == "step-00000002.1\n"
    assert "has no checkpoint '5'" in out_of(capsys, "delete", tmp_path, "5", code=2)
    out_of(capsys, "delete", root, "1", "2", "--last")
    assert names(root) == []


def test_delete_does_not_take_one_for_sound_by_its_length(tmp_path, capsys):
    paths = [save_alone(tmp_path, step) for step in (1, 2)]
    flip(paths[1] / "00000-0000.safetensors")
    assert "this would delete the last intact checkpoint" in out_of(
        capsys, "delete", tmp_path, "1", code=2
    )
    out_of(capsys, "delete", tmp_path, "2")
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_repair_clears_and_points_at_what_verifies(tmp_path, capsys):
    root = tmp_path / "checkpoints"
    paths = [save_alone(root, step) for step in (1, 2, 3)]
    flip(paths[2] / "00000-0000.safetensors")
    (root / ".staging-00000004-abc").mkdir()
    text = out_of(capsys, "repair", tmp_path)
    assert "removed" in text
    assert "skipped: " in text
    assert "step-00000003" in text
    assert (root / "latest").read_text() == "step-00000002\n"
    assert names(root) == ["latest", *(path.name for path in paths)]
    assert out_of(capsys, "repair", tmp_path).count("\n") == 2, "nothing is left to do"
    paths[1].rename(root / "step-00000009")
    assert "step-00000009 holds step 2" in out_of(capsys, "repair", tmp_path)
    assert (root / "latest").read_text() == "step-00000001\n"
    for path in root.glob("*/manifest.json"):
        path.unlink()
    assert "has no intact checkpoint" in out_of(capsys, "repair", tmp_path, code=5)


def test_a_folder_in_the_place_of_the_pointer_is_one_line(tmp_path, capsys):
    save_alone(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    wrong = f"cannot write to {tmp_path / 'latest'}: Is a directory"
    assert wrong in out_of(capsys, "repair", tmp_path, code=5)
    assert wrong in out_of(capsys, "delete", tmp_path, "1", "--last", code=5)


@pytest.mark.parametrize("command", [["repair"], ["delete", "1"]])
def test_nothing_is_removed_while_a_job_has_the_run(tmp_path, capsys, command):
    save_alone(tmp_path / "checkpoints", 1)
    save_alone(tmp_path / "checkpoints", 2)
    (tmp_path / "checkpoints" / ".staging-3").mkdir()
    lock = RunLock(tmp_path)
    name, *rest = command
    assert "is in use by" in out_of(capsys, name, tmp_path, *rest, code=2)
    assert (tmp_path / "checkpoints" / ".staging-3").exists()
    lock.release()
    out_of(capsys, name, tmp_path, *rest)
