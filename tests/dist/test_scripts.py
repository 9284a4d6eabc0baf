"""The shell scripts, run for real against stand-ins for what they install and start.

``python`` below makes true virtual environments, but its pip is a few lines that keep a log and
install packages of one module each.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parity.stand_ins import write_program
from tests.parity.tiers import in_parts
from tests.running import lowest_packages, python_versions
from tests.running.processes import BY_FILE

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
SHELL_FILES = [
    path
    for path in [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci/run"]
    if path.exists()
]
MODULES = ("ruff", "mypy", "pytest")
IN_TREE = ("megapipe/__main__", "megapipe/launch")

# The pip of a stand-in environment: logs its arguments; installs a module per requirement.
PIP = """
import json, os, sys, sysconfig, pathlib
tree = pathlib.Path(sys.prefix).parent
site = pathlib.Path(sysconfig.get_path("purelib"))
with open(tree / "log", "a") as log:
    print(json.dumps(["pip", *sys.argv[1:]]), file=log)
if "--no-deps" in sys.argv:
    sys.exit(int(os.environ.get("EXIT_PEERS", "0")))
name = "torch" if sys.argv[-1] == "torch" else "rest"
info = site / f"{name}-1.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1\\n")
print("pip says", name)
if os.environ.get("PIP_FAILS_AT") == name:
    sys.exit(1)
if os.environ.get("PIP_DIES_AT") == name:
    os.kill(os.getppid(), 9)
    os._exit(9)
files = ["torch/__init__.py", "torch/distributed/__init__.py"] if name == "torch" else ["rest.py"]
for file in files:
    (site / file).parent.mkdir(exist_ok=True)
    (site / file).write_text("# whole\\n")
lines = [f"{file},,{(site / file).stat().st_size}" for file in files]
(info / "RECORD").write_text("\\n".join([*lines, f"{info.name}/METADATA,,"]) + "\\n")
"""

# What the scripts start with `python -m`: logs its arguments, exits as EXIT_<NAME> says. pytest is
# called links where it looks at these.
TOOL = """
import json, os, pathlib, sys
name = "links" if "links" in sys.argv else "{name}"
with open(pathlib.Path(sys.prefix).parent / "log", "a") as log:
    print(json.dumps(["{name}", *sys.argv[1:]]), file=log)
assert os.environ["OMP_NUM_THREADS"] == "1"
print("{name} says", flush=True)
if os.environ.get("WAITS") == name:
    import time
    time.sleep(600)
sys.exit(int(os.environ.get("EXIT_" + name.upper(), "0")))
"""

# `-m venv --clear FOLDER` makes an environment with that pip; all else goes to the true Python.
PYTHON = """#!/usr/bin/env bash
set -eu
if [[ ${{1:-}} == -m && $2 == venv ]]; then
  [[ $3 == --clear ]]
  {python} -m venv --clear --without-pip "$4"
  site=$("$4/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r "$STAND_INS"/. "$site"
else
  exec {python} "$@"
fi
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Copy what the scripts need, with a stand-in for python3 in front on PATH."""
    root = tmp_path / "tree with spaces"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "constraints.txt").write_text("torch==1\n")
    dependencies = 'dependencies = ["torch>=1.0", "rest>=1.0,<2"]'
    extras = '[project.optional-dependencies]\nexact = ["solver"]'
    (root / "pyproject.toml").write_text(
        f'[project]\nrequires-python = ">=3.11"\n{dependencies}\n{extras}\n'
    )
    shutil.copytree(ROOT / "tests/running", root / "tests/running")
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs/glossary.md", root / "docs")

    stand_ins = tmp_path / "stand_ins"
    (stand_ins / "pip").mkdir(parents=True)
    (stand_ins / "pip/__init__.py").touch()
    (stand_ins / "pip/__main__.py").write_text(PIP)
    for module in (*MODULES, *IN_TREE):
        path = (root if module in IN_TREE else stand_ins) / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.stem
        path.write_text(TOOL.format(name=name))

    binaries = tmp_path / "bin"
    binaries.mkdir()
    write_program(binaries / "python3", PYTHON.format(python=sys.executable))
    monkeypatch.setenv("STAND_INS", str(stand_ins))
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    for name in ("PYTHON", "OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))  # and no other version of Python
    return root


def run(tree, script, *arguments, **environment):
    return subprocess.run(
        [str(tree / "scripts" / script), *arguments],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def started_in(tree):
    """Return what was started since the log was taken, in order, without the options of pytest by
    which times are recorded in a file somewhere."""
    log = tree / "log"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    lines = [[line[0], *line[5:]] if line[1:2] == ["-p"] else line for line in lines]
    return [[word for word in line if "/three-steps-" not in word] for line in lines]


def take_log(tree):
    """Return what was started, and begin a new log; mypy, which runs beside all else, is put where
    it is started."""
    lines = started_in(tree)
    (tree / "log").unlink(missing_ok=True)
    if ["mypy"] in lines:
        lines.remove(["mypy"])
        lines.insert(lines.index(LINT[1]), ["mypy"])
    return lines


PIP_START = ["pip", "--disable-pip-version-check", "install"]
WITH_PINS = [*PIP_START, "--no-compile", "-c", "constraints.txt"]
INSTALL = [[*WITH_PINS, "torch"], [*WITH_PINS, "-e", ".[log,dev]"]]
TO_TRAIN = [INSTALL[0], [*WITH_PINS, "-e", "."]]
LINT = [["mypy"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]]
LINKS = ["pytest", "-q", "-k", "links", "tests/unit/test_docs.py", "tests/unit/test_guides.py"]
OTHER_SYSTEMS = [
    *(*PIP_START, "-q", "--no-deps", "megatron-core==0.16.1", "peft==0.21.2"),
    *("lm_eval==0.4.13", "accelerate==1.15.0", "colorama==0.4.6", "lxml==6.0.2"),
    *("portalocker==4.4.2", "sacrebleu==2.5.1", "tabulate==0.10.0"),
]
SOLVER = [*PIP_START, "-q", "-c", "constraints.txt", "solver"]


WORKERS = ["-n", "3", *BY_FILE, "--durations=30"]
PYTEST = ["pytest", "-m", "not slow and not gpu and not full and not deadline", *WORKERS]
CHECKS = [*LINT, LINKS, PYTEST]


def full(tree):
    """Return what --full starts; the older transformers is in a folder of the environment."""
    older = ["transformers==4.57.1", "huggingface-hub==0.36.2", "tokenizers==0.22.2"]
    target = ["--target", str(tree / ".venv/older-transformers")]
    lowest = ["--target", str(tree / ".venv/lowest-packages"), "rest==1.0"]
    # a module that is imported, and a training
    three_steps = [["launch"], ["__main__", *python_versions.TRAINING[2:]]]
    return [
        *(*LINT, LINKS, OTHER_SYSTEMS, [*PIP_START, "-q", "--no-deps", *target, *older]),
        SOLVER,
        ["pytest", "-m", "not slow and not gpu and not deadline", *WORKERS],
        *three_steps,
        [*PIP_START, "-q", *lowest],
        *three_steps,
        ["pytest", "-q", "-p", "no:cacheprovider", *lowest_packages.TESTS],
    ]


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shell_files_parse_and_pass_shellcheck(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        result = subprocess.run(
            ["shellcheck", "-x", str(path)], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout


def test_all_scripts_are_looked_at():
    assert {"quickstart.sh", "test.sh", "venv.sh", "train.sbatch"} <= {p.name for p in SHELL_FILES}


def test_a_missing_environment_is_made_torch_first_and_kept(tree):
    assert run(tree, "test.sh").returncode == 0
    assert take_log(tree) == [*INSTALL, *CHECKS]
    assert run(tree, "test.sh", "-k", "a or b").returncode == 0
    assert take_log(tree) == [*LINT, ["pytest", "-k", "a or b"]]
    assert run(tree, "test.sh", "--full").returncode == 0
    assert take_log(tree) == full(tree)


def test_without_other_systems_all_else_is_tested(tree):
    run(tree, "test.sh")
    take_log(tree)
    done = run(tree, "test.sh", "--full", EXIT_PEERS="1")
    assert (done.returncode, done.stderr) == (
        0,
        "other systems cannot be installed: most of tests/external is left out\n",
    )
    assert take_log(tree) == full(tree)


def test_without_a_solver_all_else_is_tested(tree):
    run(tree, "test.sh")
    take_log(tree)
    done = run(tree, "test.sh", "--full", PIP_FAILS_AT="rest")
    assert (done.returncode, done.stderr) == (
        0,
        "OR-Tools cannot be installed: comparisons with exact searches are left out\n",
    )
    assert SOLVER in take_log(tree)


def test_a_check_that_fails_is_the_exit_code(tree):
    install = INSTALL
    for tool, phase, started in [
        ("RUFF", "lint", LINT[1:2]),
        ("LINKS", "links", CHECKS[1:4]),
        ("PYTEST", "tests", CHECKS[1:]),
    ]:
        done = run(tree, "test.sh", **{f"EXIT_{tool}": "3"})
        assert done.returncode == 1
        assert re.search(rf"^{phase} .* failed$", done.stdout, re.MULTILINE)
        assert [line for line in take_log(tree) if line != ["mypy"]] == [*install, *started]
        install = []
    done = run(tree, "test.sh", EXIT_MYPY="3", WAITS="pytest")
    assert done.returncode == 1
    assert "\nmypy says\n" in done.stdout
    assert re.search(r"^types .* failed$", done.stdout.splitlines()[-1])


def test_the_exit_code_where_arguments_go_to_pytest(tree):
    install = INSTALL
    for tool, code in [("PYTEST", 3), ("MYPY", 1)]:
        done = run(tree, "test.sh", "tests/unit", **{f"EXIT_{tool}": "3"})
        assert done.returncode == code
        assert take_log(tree) == [*install, *LINT, ["pytest", "tests/unit"]]
        install = []


def test_ctrl_c_ends_the_tests_and_the_types_beside_them(tree):
    """A terminal sends the signal to all, but to a process in the background it says nothing."""
    run(tree, "test.sh")
    take_log(tree)
    for tool in MODULES[1:]:
        started = subprocess.Popen(
            [tree / "scripts/test.sh"],
            env={**os.environ, "WAITS": tool},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while PYTEST not in started_in(tree):
            assert started.poll() is None
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)
        started.communicate(timeout=60)  # its output ends with the last process that has it
        assert started.returncode == 130
        take_log(tree)


@in_parts("package", ["torch", "rest"], full=2)
def test_an_install_that_was_killed_is_started_over(tree, package):
    assert run(tree, "test.sh", PIP_DIES_AT=package).returncode == -signal.SIGKILL
    take_log(tree)
    (tree / ".venv/left_over").touch()
    assert run(tree, "test.sh").returncode == 0
    assert take_log(tree) == [*INSTALL, *CHECKS]
    assert not (tree / ".venv/left_over").exists()


def break_interpreter(venv):
    for path in (venv / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("/nowhere/python")


def one_file(venv, name):
    (path,) = venv.glob(f"lib/python*/site-packages/{name}")
    return path


DAMAGES = {
    "no interpreter": break_interpreter,
    "nothing in it": lambda venv: [shutil.rmtree(venv), venv.mkdir()],
    "no pip": lambda venv: shutil.rmtree(one_file(venv, "pip")),
    "a file is gone": lambda venv: one_file(venv, "torch/distributed/__init__.py").unlink(),
    "a file is cut short": lambda venv: one_file(venv, "rest.py").write_text("# wh"),
    "no record": lambda venv: one_file(venv, "torch-1.dist-info/RECORD").unlink(),
}


@in_parts("damage", DAMAGES.values(), full=6, ids=list(DAMAGES))
def test_a_damaged_environment_is_made_anew(tree, damage):
    run(tree, "test.sh")
    take_log(tree)
    (tree / ".venv/left_over").touch()
    damage(tree / ".venv")
    assert run(tree, "test.sh").returncode == 0
    assert take_log(tree) == [*INSTALL, *CHECKS]
    assert not (tree / ".venv/left_over").exists()


def change_pins(tree):
    (tree / "constraints.txt").write_text("torch==2\n")
    return tree


def move(tree):
    return tree.rename(tree.with_name("moved"))


def forget_stamp(tree):
    (tree / ".venv/megapipe.stamp").unlink()
    return tree


def test_an_outdated_environment_is_updated_in_place(tree):
    run(tree, "test.sh")
    take_log(tree)
    (tree / ".venv/kept").touch()
    for change in (change_pins, move, forget_stamp):
        tree = change(tree)
        assert run(tree, "test.sh").returncode == 0
        assert take_log(tree) == [*INSTALL, *CHECKS], change.__name__
        assert (tree / ".venv/kept").exists()
        run(tree, "test.sh")
        assert take_log(tree) == CHECKS, change.__name__


def test_two_at_once_install_once(tree):
    command = ["bash", "-c", 'set -eu; source "$0"', str(tree / "scripts/venv.sh")]
    both = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert take_log(tree) == TO_TRAIN


def test_another_python_version_on_request(tree, tmp_path):
    run(tree, "test.sh")
    take_log(tree)
    assert run(tree, "test.sh", PYTHON="python3").returncode == 0
    assert take_log(tree) == CHECKS
    other = tmp_path / "other"
    text = PYTHON.format(python=sys.executable).replace(
        "else\n", "elif [[ ${1:-} == -c && $2 == *version_info\\[:2\\]* ]]; then echo 9\nelse\n"
    )
    write_program(other, text)
    assert run(tree, "test.sh", PYTHON=str(other)).returncode == 0
    assert take_log(tree) == [*INSTALL, *CHECKS]


OLD = '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit\nexit 1\n'
WITHOUT_VENV = (
    '#!/bin/sh\ncase "$*" in *ensurepip*) echo No module >&2; exit 1;; esac\nexec {} "$@"\n'
)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "is not on this machine; install Python 3.11 or newer, or set PYTHON to one"),
        (OLD, "is Python 3.9.2; set PYTHON to Python 3.11 or newer"),
        (WITHOUT_VENV.format(sys.executable), "lacks its venv module (on Debian and Ubuntu: "),
    ],
)
def test_an_unusable_python_is_one_clear_line(tree, tmp_path, program, message):
    python = tmp_path / "unusable"
    if program is not None:
        write_program(python, program)
    result = run(tree, "test.sh", PYTHON=str(python))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"test.sh: {python} {message}")
    assert not (tree / ".venv").exists()


def test_a_wrong_python_leaves_the_environment_as_it_is(tree):
    run(tree, "test.sh")
    take_log(tree)
    result = run(tree, "test.sh", PYTHON="/nowhere/python")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    run(tree, "test.sh")
    assert take_log(tree) == CHECKS


def test_quickstart_trains_eight_processes_and_sums_up(tree):
    assert run(tree, "quickstart.sh", "train.steps=5", "data.source=a b").returncode == 0
    *install, launch, summary, generate = take_log(tree)
    assert install == TO_TRAIN
    name = launch[5].removeprefix("run.name=")
    assert re.fullmatch(r"quickstart-\d{8}-\d{6}", name)
    assert launch == [
        *("launch", "--nproc", "8"),
        *("train.py", "configs/quickstart.yaml", f"run.name={name}"),
        *("train.steps=5", "data.source=a b"),
    ]
    assert summary == ["__main__", "summary", f"runs/{name}"]
    assert generate[:3] == ["__main__", "generate", f"runs/{name}"]


def test_tests_add_their_packages_to_those_of_training(tree):
    """And an environment for tests trains."""
    run(tree, "quickstart.sh", "--help")
    take_log(tree)
    (tree / ".venv/kept").touch()
    assert run(tree, "test.sh").returncode == 0
    assert take_log(tree) == [*INSTALL, *CHECKS]
    run(tree, "quickstart.sh", "--help")
    assert [line[0] for line in take_log(tree)] == ["launch"]
    assert (tree / ".venv/kept").exists()


def test_each_phase_of_an_install_is_told_before_it_begins(tree):
    """In few lines; what pip prints is in a file."""
    done = run(tree, "quickstart.sh", "--help")
    told = [line.removeprefix("quickstart.sh: ") for line in done.stderr.splitlines()]
    assert told[0].startswith("making .venv with Python 3.")
    assert told[1:] == [
        "installing torch",
        "installing what training needs",
        "compiling what was installed",
    ]
    assert (tree / ".venv/pip.log").read_text() == "pip says rest\n"


@in_parts("package", ["torch", "rest"], full=2)
def test_an_install_that_fails_shows_the_end_of_what_pip_prints(tree, package):
    done = run(tree, "quickstart.sh", PIP_FAILS_AT=package)
    assert done.returncode == 1
    *_, shown, last = done.stderr.splitlines()
    assert shown == f"pip says {package}"
    assert "could not be installed; .venv/pip.log has all that pip printed" in last
    assert run(tree, "quickstart.sh", "--help").returncode == 0


def test_quickstart_follows_the_run_folder_of_its_arguments(tree):
    run(tree, "quickstart.sh", "run.name=mine", "run.folder=/data/my runs")
    assert take_log(tree)[-2] == ["__main__", "summary", "/data/my runs/mine"]


def test_quickstart_goes_on_with_the_last_of_its_runs(tree):
    done = run(tree, "quickstart.sh", "--resume")
    assert done.returncode == 2
    assert done.stderr.endswith("quickstart.sh: --resume: no run has begun in runs/quickstart-*\n")
    newest = "quickstart-20260102-030406"
    for name in ("quickstart-20260102-030405", newest, "other"):
        (tree / "runs" / name).mkdir(parents=True)
        for age, start in enumerate(("config-step-00000004.yaml", "config.yaml")):
            (tree / "runs" / name / start).touch()
            os.utime(tree / "runs" / name / start, (10**9 - age, 10**9 - age))
    take_log(tree)
    for given, name in (("train.steps=5", newest), ("run.name=other", "other")):
        assert run(tree, "quickstart.sh", "--resume", given).returncode == 0
        launch, summary, _ = take_log(tree)
        settings = [f"runs/{name}/config-step-00000004.yaml", f"run.name={name}", given]
        assert launch[-3:] == settings, "those of its last start"
        assert summary[-1] == f"runs/{name}"


def test_quickstart_passes_a_failure_on_and_sums_nothing_up(tree):
    assert run(tree, "quickstart.sh", EXIT_LAUNCH="1").returncode == 1
    assert take_log(tree)[-1][0] == "launch"


def test_quickstart_has_nothing_to_sum_up_without_a_run(tree):
    for option in ("--dry-run", "--help"):
        assert run(tree, "quickstart.sh", option).returncode == 0
        assert take_log(tree)[-1][0] == "launch", option


APT = """#!/usr/bin/env bash
echo "$@" >>"$APT_LOG"
exit "${EXIT_APT:-0}"
"""


@pytest.fixture
def ci(tree, monkeypatch):
    """Make a tree with .ci/run, an apt-get that notes what it is asked for, and all programs of
    this machine but SLURM's, which may be beside others."""
    if not (ROOT / ".ci/run").exists():
        pytest.skip("no .ci in this copy")
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    write_program(tree.parent / "bin/apt-get", APT)
    (programs := tree.parent / "programs").mkdir()
    for place in map(Path, os.environ["PATH"].split(":")):
        for program in place.iterdir() if place.is_dir() else ():
            link = programs / program.name
            if not link.is_symlink() and program.name not in ("sbatch", "slurmctld"):
                link.symlink_to(program)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("APT_LOG", str(tree.parent / "apt.log"))
    return tree


@pytest.mark.parametrize("code", [0, 100], ids=["installed", "no network"])
@pytest.mark.parametrize("there", [[], ["sbatch"], ["sbatch", "slurmctld"]], ids=str)
def test_ci_runs_the_test_script_with_a_slurm_if_it_can_have_one(ci, there, code):
    for name in there:
        write_program(ci.parent / "programs" / name, "#!/bin/sh\n")
    done = run(ci, "../.ci/run", EXIT_APT=str(code))
    assert done.returncode == 0
    assert take_log(ci) == [*INSTALL, *full(ci)]
    log, asks = ci.parent / "apt.log", os.geteuid() == 0 and len(there) < 2
    asked = [line.split()[1] for line in log.read_text().splitlines()] if asks else []
    assert asked == (["update", "install"] if code == 0 else ["update"]) * asks
    assert log.exists() == asks
    told = ".ci/run: slurm-wlm cannot be installed: tests/cluster is left out\n"
    assert (told in done.stderr) == (len(there) < 2 and (not asks or code != 0))
