#!/usr/bin/env bash
# Lint, types and tests, in the .venv that it makes when there is none:
#   scripts/test.sh                          ten minutes on two cores
#   scripts/test.sh --full                   all that CI runs: also what others nearly prove, and
#                                            comparisons with other systems, which it installs
#   scripts/test.sh tests/unit -k schedule   arguments go to pytest, which then runs in one process
# A few tests that fail in a whole run are run once more, alone: deadlines may be missed where three
# workers share two cores. The run passes if they do, and names them.
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

marks='not slow and not gpu and not full'
if [[ ${1:-} == --full ]]; then
  marks='not slow and not gpu'
  shift
fi
whole=$(($# == 0))
if ((whole)); then
  # a file's worlds and fixtures are one worker's; the long ones, of several processes, come first;
  # three for two cores, as one often waits for a deadline
  set -- -m "$marks" -n 3 --dist loadfile --no-loadscope-reorder --durations=30
fi

export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # set, each of the thousand processes would compile the sources again
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
types=$(mktemp)
.venv/bin/python -m mypy >"$types" 2>&1 & # one core's work, beside the tests
mypy=$!
trap 'kill $mypy 2>/dev/null || :; rm -f "$types"' EXIT
trap 'exit 130' INT # what runs in the background does not hear Ctrl-C
if [[ $marks == 'not slow and not gpu' ]]; then
  # megatron-core, peft and lm-evaluation-harness, with what the last two need to be imported
  .venv/bin/python -m pip --disable-pip-version-check install -q --no-deps megatron-core==0.16.1 \
    peft==0.21.2 lm_eval==0.4.13 accelerate==1.15.0 colorama==0.4.6 lxml==6.0.2 \
    portalocker==4.4.2 sacrebleu==2.5.1 tabulate==0.10.0 ||
    printf 'other systems cannot be installed: most of tests/external is left out\n' >&2
fi

status=0
.venv/bin/python -m pytest "$@" || status=$?
failed=.pytest_cache/v/cache/lastfailed # a JSON object with a line for each
if ((whole && status == 1)) && (($(grep -c '": true' "$failed") <= 5)); then
  again=$(cat "$failed")
  printf 'once more, alone:\n%s\n' "$again"
  status=0
  .venv/bin/python -m pytest -m "$marks" --last-failed --last-failed-no-failures none || status=$?
  ((status)) || printf 'passed alone, after a failure beside others:\n%s\n' "$again" >&2
fi
wait "$mypy" || status=$?
cat "$types"
exit "$status"
