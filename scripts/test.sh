#!/usr/bin/env bash
# Lint, types and tests, in the .venv that it makes when there is none:
#   scripts/test.sh --changed                what a change needs, in three minutes
#   scripts/test.sh                          all without a mark
#   scripts/test.sh --full                   all that CI runs
#   scripts/test.sh tests/unit -k schedule   arguments go to pytest, which then runs in one process
#   scripts/test.sh --help                   everything else (tests/running)
set -euo pipefail
venv_for=tests
# shellcheck source=scripts/venv.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # set, each of the thousand processes would compile the sources again
exec .venv/bin/python -m tests.running "$@"
