"""The files of the package, and its optional dependencies."""

from __future__ import annotations

from pathlib import Path

import megapipe

PACKAGE = Path(megapipe.__file__).parent
FILES = {
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Files by dotted name (a package's ends in ``.__init__``)."""
OPTIONAL = ("wandb", "tensorboard", "torch.utils.tensorboard", "datasets", "transformers")
KERNELS = ("apex", "flash_attn", "liger_kernel")
ADAPTERS = ("megapipe.evaluate.harness", "megapipe.model.hf", "megapipe.convert.class_export")
"""Modules and packages that adapt an optional package, and are imported on request."""


def inside(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)
