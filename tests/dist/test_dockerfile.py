"""The installation of the Dockerfile, run for real against a stand-in for python."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.parity.stand_ins import write_program

ROOT = Path(__file__).parents[2]


def docker_install(tmp_path, packages, **environment):
    """Run the Dockerfile's installation with a stand-in for python; return pip's arguments."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    command = re.search(r"^RUN (.*?[^\\])$", dockerfile, re.MULTILINE | re.DOTALL)[1]
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, re.MULTILINE)
    command = command.replace("\\\n", "").replace("/tmp/", f"{tmp_path}/")
    listing = "\\n".join(packages)
    program = f"""\
        #!/usr/bin/env bash
        if [[ $3 == list ]]; then
          printf '{listing}\\n'
        else
          echo "$@ [${{PIP_CONSTRAINT-none}}] $(tr '\\n' ' ' <"$5")" >>"{tmp_path}/log"
        fi
    """
    write_program(tmp_path / "python", textwrap.dedent(program))
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "EXTRAS": extras, **environment},
        check=True,
    )
    assert not (tmp_path / "pins.txt").exists()
    return (tmp_path / "log").read_text().replace(f"{tmp_path}/", "/tmp/").splitlines()


needs_dockerfile = pytest.mark.skipif(
    not (ROOT / "Dockerfile").exists(), reason="no Dockerfile in this copy"
)


@needs_dockerfile
def test_docker_keeps_the_torch_of_nvidias_image(tmp_path):
    (tmp_path / "image.txt").write_text("requests==2.0\n")
    packages = [
        *("numpy==2.1.0", "numpy-quaternion==1.0", "pip==25.0", "torch==2.11.0a0+a6c.nv26.3"),
        *("torchvision==0.26.0", "triton==3.6.0"),
    ]
    (install,) = docker_install(tmp_path, packages, PIP_CONSTRAINT=str(tmp_path / "image.txt"))
    assert install == (
        "-m pip install -c /tmp/pins.txt -e .[log] [none] numpy==2.1.0 "
        "torch==2.11.0a0+a6c.nv26.3 torchvision==0.26.0 triton==3.6.0 requests==2.0 "
    )


@needs_dockerfile
def test_docker_on_a_plain_image_installs_the_pinned_cpu_torch_first(tmp_path):
    torch, rest = docker_install(tmp_path, ["pip==25.0"])
    assert torch == (
        "-m pip install -c /tmp/pins.txt torch --index-url https://download.pytorch.org/whl/cpu"
        " [none] torch==2.13.0 "
    )
    assert rest == "-m pip install -c /tmp/pins.txt -e .[log] [none] torch==2.13.0 "
