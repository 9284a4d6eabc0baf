"""Nothing in the package turns data into code: its syntax trees have no call that could."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megapipe

PACKAGE = Path(megapipe.__file__).parent
ROOT = PACKAGE.parent
FILES = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), ROOT / "train.py"]

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "execfile", "__import__"}
METHODS = {
    *("os.system", "os.popen", "builtins.eval", "builtins.exec"),
    *(f"yaml.{how}{which}" for how in ("", "unsafe_", "full_") for which in ("load", "load_all")),
    *("subprocess.getoutput", "torch.load", "torch.save", "numpy.fromregex"),
}
OBJECTS = {
    *("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Collectives that pickle, of whichever module."""
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code", "weights_only"}
SAFE = {"weights_only": True}
"""The value of a keyword that is allowed; of the others it is False."""
IMPORTS = {"import_module", "spec_from_file_location", "run_module", "run_path"}
"""Calls that load code by its name; a name that is written there is like an import."""
LOADERS = {"from_pretrained"}
"""Methods that ask whether to run code of a folder unless they are told not to."""

EXCEPTIONS = {
    # user-defined functions, to processes that this one has started and from them: over pipes
    ("launch/local.py", "import pickle"),
    # an unpickler that knows names of plain data alone, and the error that torch raises
    ("convert/dcp/metadata.py", "import pickle"),
    ("convert/pickles.py", "import pickle"),
    # names that users give, unless run.user_code refuses them; packages and modules of fixed lists
    ("util/user_code.py", "importlib.import_module"),
    ("ops/probe.py", "importlib.import_module"),
    ("console.py", "import_module"),
    ("completion.py", "import_module"),
    ("__init__.py", "import_module"),
    ("launch/fork_server.py", "importlib.import_module"),
    # the modules of a folder of this package
    ("plan/algorithms/registry.py", "import_module"),
    # train.py beside this package, and this package
    ("launch/fork_server.py", "runpy.run_path"),
    ("launch/fork_server.py", "runpy.run_module"),
    # with model.options.trust_remote_code=true alone, unless user code is refused
    ("model/hf/source.py", "AutoConfig.from_pretrained(trust_remote_code=...)"),
    ("model/hf/source.py", "AutoModelForCausalLM.from_config(trust_remote_code=...)"),
    # with --trust-pickle alone
    ("convert/pickles.py", "torch.load"),
    ("convert/pickles.py", "torch.load(weights_only=...)"),
    # with yaml.BaseLoader, which makes text, lists and mappings alone
    ("config/foreign.py", "yaml.load"),
}
"""(file, finding) that are there for a reason."""

WORDS = [
    *(*MODULES, *CALLS, *OBJECTS, *KEYWORDS, *IMPORTS, *LOADERS),
    *(name.rsplit(".", 1)[1] for name in METHODS),
]
SUSPECT = re.compile(rf"\b({'|'.join(WORDS)})\b")
"""Files without one of these words have no finding, and are not parsed."""


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from (f"import {name}" for name in names if name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module is not None and node.module.split(".")[0] in MODULES:
                yield f"import {node.module}"
            yield from (f"import {a.name}" for a in node.names if a.name in OBJECTS)
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (f"import {name}" for name in whole if name in METHODS)
        elif isinstance(node, ast.Call):
            yield from of_call(node)


def of_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func).replace("np.", "numpy.")
    values = {
        keyword.arg: keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
        for keyword in call.keywords
    }
    safe = name == "torch.load" and values.get("weights_only") is True
    last = name.rsplit(".", 1)[-1]
    if name in CALLS or last in OBJECTS or (name in METHODS and not safe):
        yield name
    if last in IMPORTS and not all(isinstance(given, ast.Constant) for given in call.args):
        yield name
    if last in LOADERS and "trust_remote_code" not in values:
        yield name
    for key in KEYWORDS & values.keys():
        if values[key] is not SAFE.get(key, False):
            yield f"{name}({key}=...)"


def dotted(function: ast.expr) -> str:
    """Return the name of a function, as in ``torch.load``."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_no_call_turns_data_into_code() -> None:
    found = {
        (str(path.relative_to(PACKAGE) if PACKAGE in path.parents else path.name), finding)
        for path in FILES
        if SUSPECT.search(text := path.read_text(encoding="utf-8"))
        for finding in findings(ast.parse(text))
    }
    assert len(FILES) > 300
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("from torch.distributed import gather_object", "import gather_object"),
        ("dist.gather_object(1)", "dist.gather_object"),
        ("from os import system", "import os.system"),
        ("from yaml import load as read", "import yaml.load"),
        ("yaml.full_load_all(text)", "yaml.full_load_all"),
        ("dist.recv_object_list(x)", "dist.recv_object_list"),
        ("eval('1')", "eval"),
        ("builtins.eval('1')", "builtins.eval"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("yaml.load(text, Loader=Loader)", "yaml.load"),
        ("subprocess.run(x, shell=True)", "subprocess.run(shell=...)"),
        ("subprocess.run(x, shell=given)", "subprocess.run(shell=...)"),
        ("np.load(x, allow_pickle=True)", "numpy.load(allow_pickle=...)"),
        ("auto.of(x, trust_remote_code=True)", "auto.of(trust_remote_code=...)"),
        ("os.system('x')", "os.system"),
        ("importlib.import_module(name)", "importlib.import_module"),
        ("AutoTokenizer.from_pretrained(x)", "AutoTokenizer.from_pretrained"),
        (
            "AutoTokenizer.from_pretrained(x, trust_remote_code=given)",
            "AutoTokenizer.from_pretrained(trust_remote_code=...)",
        ),
    ],
)
def test_what_is_found(line: str, finding: str) -> None:
    assert finding in list(findings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        *("model.eval()", "torch.load(x, weights_only=True)", "np.load(x, allow_pickle=False)"),
        *("import_module('a.b')", "Auto.from_pretrained(x, trust_remote_code=False)"),
    ],
)
def test_what_is_not_found(line: str) -> None:
    assert not list(findings(ast.parse(line)))
