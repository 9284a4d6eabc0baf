"""Mistakes on the command line of scripts/schedule.py: one line each."""

import pytest

from megapipe.schedule.commands import main

SMALL = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture
def refuse(capsys):
    """Return a function that runs a command and returns the one line of its mistake."""

    def run(*argv: str) -> str:
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("megapipe: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err.removeprefix("megapipe: error: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["simulat"], "invalid choice: 'simulat'"),
        (["simulate"], "required: NAME, --ranks, --microbatches"),
        (["simulate", "zb_h2x", *SMALL], "'zb_h2x' is unknown; did you mean "),
        (["simulate", "1f1b", *SMALL, "--fo\no"], "unrecognized arguments: --fo o"),
        (
            ["simulate", "1f1b", *SMALL, "--ranks", "0"],
            "--ranks: '0' is not a whole number from 1 to 65536",
        ),
        (["simulate", "1f1b", *SMALL, "--ranks", "1e2"], "'1e2' is not a whole number from 1 to"),
        (["simulate", "1f1b", "--ranks", "4", "--microbatches", "16777216"], "from 1 to 16777215"),
        (["simulate", "1f1b", *SMALL, "--chunks", "2"], "schedule 1f1b: chunks must be 1, not 2"),
        (["simulate", "1f1b", *SMALL, "--cost", "F"], "--cost: '' is not a number >= 0"),
        (["simulate", "1f1b", *SMALL, "--cost", "G=1"], "--cost: 'G=1' is not one of F, I, W, B"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=1,F=2"], "--cost: F is given twice"),
        (["simulate", "1f1b", *SMALL, "--cost", "reduce=-1"], "'-1' is not a number >= 0"),
        (
            ["simulate", "1f1b", *SMALL, "--zero", "4"],
            "--zero: invalid choice: 4 (choose from 0, 1",
        ),
        (["simulate", "1f1b", *SMALL, "--prefetch", "-1"], "'-1' is not a whole number from 0 to"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=-1"], "'-1' is not a number >= 0"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=nan"], "'nan' is not a number >= 0"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=1e999"], "'1e999' is more than 1e30"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=1/0"], "'1/0' is not a number >= 0"),
        (["simulate", "1f1b", *SMALL, "--cost", "F=0,B=0"], "give at least one cost above 0"),
        (["simulate", "1f1b", *SMALL, "--freed-by-input-grad", "2"], "'2' is not from 0 to 1"),
        (
            ["simulate", "zb_2p", *SMALL, "--memory-accounting", "weighted"],
            "--memory-accounting: weighted needs --freed-by-input-grad, the share",
        ),
        (["search", *SMALL, "--memory-accounting", "weighted"], "needs --freed-by-input-grad"),
        (["simulate", "1f1b", *SMALL, "--bandwidth", "0"], "bandwidth"),
        (["simulate", "1f1b", *SMALL, "--objective", "x"], "invalid choice: 'x'"),
        (["simulate", "1f1b", *SMALL, "--placement", "v"], "1f1b: its placement is single"),
        (["simulate", "none.csv", *SMALL], "none.csv: No such file or directory"),
        (["simulate", "none:f", *SMALL], "there is no module 'none'"),
        (["show", "1f1b", *SMALL, "--width", "-1"], "'-1'"),
        (["draw", "1f1b", *SMALL], "required: -o/--output"),
        (["draw", "1f1b", *SMALL, "-o", "x.gif"], "x.gif does not end in .svg, .png, .json"),
        (["draw", "1f1b", *SMALL, "-o", "/none/x.svg"], "/none/x.svg: cannot be written: No such"),
        (["draw", "1f1b", *SMALL, "-o", "/none/x.png"], "/none/x.png: cannot be written: No such"),
        (["export", "1f1b", *SMALL, "--format", "xml"], "invalid choice: 'xml'"),
        (["export", "chimera", *SMALL, "--format", "torch"], "cannot run more than one direction"),
        (["search", *SMALL, "--chunks", "3", "--placement", "v"], "v cannot have 3 chunks"),
        (["search", *SMALL, "--activation-limit", "1/2"], "activation_limit 1/2 is too small"),
        (
            ["search", *SMALL, "--sequence-slices", "2"],
            "unrecognized arguments: --sequence-slices 2",
        ),
        (["compare", "--csv", "--json", *SMALL], "not allowed with argument"),
        (["validate"], "required: FILE"),
    ],
)
def test_mistakes(argv, said, refuse):
    assert said in refuse(*argv)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "costs.json: not valid JSON: "),
        ("{}", 'costs.json: write a list with {"F": 1, "I": 1, "W": 1} for each stage'),
        ("[1]", "stage 0: 1 is not {"),
        ('[{"F": 1, "I": 1}]', "stage 0: W is missing; it has F, I and W"),
        ('[{"F": 1, "I": 1, "W": 1, "X": 1}]', "stage 0: 'X' is unknown"),
        ('[{"F": -1, "I": 1, "W": 1}]', "stage 0: F: '-1' is not a number >= 0"),
        ('[{"F": true, "I": 1, "W": 1}]', "stage 0: F: 'True' is not a number >= 0"),
        ('[{"F": 1, "I": 1, "W": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}]', "stage 1 has F, I, W"),
        ('[{"F": 1, "I": 1, "W": 1}]', "cost F: 1 times for 4 stages; give one per stage"),
    ],
)
def test_mistakes_in_stage_costs(content, said, refuse, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(content)
    assert said in refuse("simulate", "1f1b", *SMALL, "--stage-cost", path)


def test_stage_costs_of_other_ranks(refuse, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        '[{"F": 1, "I": 1, "W": 1}, {"F": 1, "I": 1, "W": 1}, {"F": 1, "I": 1, "W": 1}]'
    )
    size = ("--ranks", "2", "--microbatches", "5")
    assert refuse("search", *size, "--stage-cost", path) == (
        "argument --stage-cost: 3 stages are not a whole number of chunks on each of 2 ranks"
    )


def test_one_cost_twice(refuse, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('[{"F": 1, "I": 1, "W": 1}]')
    error = refuse("simulate", "1f1b", *SMALL, "--stage-cost", path, "--cost", "F=1")
    assert error == f"argument --cost: F is in {path} already"


def test_validate_says_what_is_wrong(refuse, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("0F0,0B0,0B0\n")
    assert f"schedule {path}: rank 0, op 2 (0B0)" in refuse("validate", path)
    path.write_text("0F0,xyz\n")
    assert "line 1, cell 2: 'xyz' is not an operation" in refuse("validate", path)
    path.write_bytes(b"\xff")
    assert refuse("validate", path) == f"{path}: not UTF-8 text"
    assert refuse("validate", tmp_path / "y.csv") == f"{tmp_path}/y.csv: No such file or directory"
