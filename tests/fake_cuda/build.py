"""The library of the device, built once for each torch and each state of its source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).parent / "library"
KEPT_S = 7 * 24 * 3600.0
"""Seconds for which the library of another state of the source is kept."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas")


class NoCompiler(Exception):
    """Raised if there is no C++ compiler."""


def library() -> Path:
    """Return the library's path. Compile it if it is missing; others that ask meanwhile wait.

    It is stored in the environment that has torch, under the version of torch and a hash of the
    source. Raises :class:`NoCompiler`.
    """
    files = sorted(SOURCE.iterdir())
    content = b"\0".join([*(file.read_bytes() for file in files), *(f.encode() for f in FLAGS)])
    version = metadata.version("torch")
    name = f"{version}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    folder = Path(sys.prefix) / "share" / "fake_cuda"
    made = folder / name
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            _compile(compiler(), part)
            part.rename(made)
            for other in folder.glob("*.so"):
                if time.time() - other.stat().st_mtime > KEPT_S:
                    other.unlink()
    return made


def compiler() -> str:
    """Return the C++ compiler. Raises :class:`NoCompiler`."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NoCompiler("no C++ compiler (g++): a device of type cuda cannot be built")
    return found


def _compile(compiler: str, out: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    include = torch / "include"
    command = [compiler, *FLAGS, str(SOURCE / "library.cpp"), "-o", str(out)]
    command += [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the device does not compile:\n{done.stderr}")
