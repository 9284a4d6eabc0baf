#!/usr/bin/env bash
# Lint, types and tests, in the .venv that it makes when there is none. Arguments go to pytest:
#   scripts/test.sh tests/unit -k schedule
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

export OMP_NUM_THREADS=1
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy
exec .venv/bin/python -m pytest "$@"
