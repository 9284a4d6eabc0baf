"""The configurations that come with megapipe, found from any folder."""

import sysconfig
from pathlib import Path

from megapipe.util.paths import is_file

FOLDERS = (
    Path(__file__).resolve().parents[2] / "configs",
    Path(sysconfig.get_path("data")) / "share/megapipe/configs",
)
"""Where the configurations are: in a checkout, or beside an installed package."""


def names() -> list[str]:
    """Names that :func:`find` takes: those of the files without their ending."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def find(given: str) -> Path:
    """The configuration file that `given` means.

    A path to a file is that file. Where there is none, ``quickstart`` and
    ``configs/quickstart.yaml`` are the configuration of that name which comes with megapipe;
    anything else stays as it is.
    """
    path = Path(given)
    name = path.stem if path.parent == Path("configs") and path.suffix == ".yaml" else given
    if not is_file(path) and name in names():
        return next(found for folder in FOLDERS if (found := folder / f"{name}.yaml").is_file())
    return path
