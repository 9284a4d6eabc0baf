"""The configurations that come with megapipe; they are found from any folder."""

import sysconfig
from pathlib import Path

from megapipe.util.paths import is_file

FOLDERS = (
    Path(__file__).resolve().parents[2] / "configs",
    Path(sysconfig.get_path("data")) / "share/megapipe/configs",
)
"""Folders with the configurations: in a checkout, or next to an installed package."""


def names() -> list[str]:
    """Return the names of megapipe's configurations: file names without the extension."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def find(given: str) -> Path:
    """Return the path of the configuration file that the user means by `given`.

    If `given` is the path of a file, that file is meant. Otherwise ``quickstart`` and
    ``configs/quickstart.yaml`` mean megapipe's configuration of that name. Any other text is
    returned as a path.
    """
    path = Path(given)
    name = path.stem if path.parent == Path("configs") and path.suffix == ".yaml" else given
    if not is_file(path) and name in names():
        return next(found for folder in FOLDERS if (found := folder / f"{name}.yaml").is_file())
    return path
