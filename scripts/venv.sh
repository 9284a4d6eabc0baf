# shellcheck shell=bash
# Sourced by the scripts beside it: changes to the root of the repository and leaves a complete
# .venv there. A missing one is made, an outdated one is brought up to date in place, and one that
# is damaged (an install that was cut short, files that are gone) is made anew. It has what training
# needs; a script that tests sets venv_for=tests before, and adds linters, pytest and the like.
#
#   PYTHON=python3.12      the interpreter to make it with; default: python3, 3.11 or newer
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#                          takes the small build of torch that has no CUDA

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit
venv_stamp=.venv/megapipe.stamp # written last: what the packages were installed for
venv_log=.venv/pip.log

venv_die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

venv_say() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
}

# The stamp of a complete environment of this tree at this place.
venv_digest() {
  .venv/bin/python -I - <<'EOF_PYTHON'
import hashlib, os, pathlib
digest = hashlib.sha256(os.fsencode(pathlib.Path.cwd()))
for name in ("constraints.txt", "pyproject.toml"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest(), end="")
EOF_PYTHON
  printf '%s\n' "${venv_for:+ $venv_for}"
}

# Succeeds if the interpreter and pip work and every file of every package is there in full.
venv_is_sound() {
  [[ -x .venv/bin/python ]] || return 1
  .venv/bin/python -I - 2>/dev/null <<'EOF_PYTHON'
import importlib.metadata, os, pip
for distribution in importlib.metadata.distributions():
    for file in distribution.files:  # None, a TypeError, when pip did not finish
        if file.suffix != ".pyc":
            size = os.stat(file.locate()).st_size
            assert file.size in (None, size), file
EOF_PYTHON
}

# Succeeds if PYTHON asks for no other version than .venv has.
venv_is_wanted() {
  local version='import sys; print(sys.version_info[:2])'
  [[ -z ${PYTHON:-} || $("$PYTHON" -c "$version" 2>/dev/null) == $(.venv/bin/python -c "$version") ]]
}

venv_create() {
  local python=${PYTHON:-python3}
  command -v "$python" >/dev/null ||
    venv_die "$python is not on this machine; install Python 3.11 or newer, or set PYTHON to one"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    venv_die "$python is $("$python" -V 2>&1); set PYTHON to Python 3.11 or newer"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    venv_die "$python lacks its venv module (on Debian and Ubuntu: apt install python3-venv)"
  venv_say "making .venv with $("$python" -V)"
  "$python" -m venv --clear .venv
}

# Keeps what pip prints; a terminal shows its last line, in one place.
venv_keep() {
  local line
  : >"$venv_log"
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$venv_log"
    [[ ! -t 2 ]] || printf '\r\033[K%.*s' "$((${COLUMNS:-80} - 1))" "$line" >&2
  done
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

# Installs; the first argument says what.
venv_pip() {
  venv_say "installing $1"
  .venv/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt \
    "${@:2}" 2>&1 | venv_keep && return
  tail -n 20 "$venv_log" >&2
  venv_say "$1 could not be installed; $venv_log has all that pip printed"
  exit 1
}

# Compiles what training and tests import, which takes a quarter of the time that pip would take for
# all files of all packages. An import that fails is told of where it is needed.
venv_compile() {
  venv_say "compiling what was installed"
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c \
    'import datasets, torch._dynamo, transformers.models.auto, megapipe.train.trainer' \
    >/dev/null 2>&1 || :
}

venv_install() {
  venv_pip "torch" torch
  if [[ -n ${venv_for:-} ]]; then
    venv_pip "what tests need" -e '.[log,dev]'
  else
    venv_pip "what training needs" -e .
  fi
  venv_compile
  venv_digest >"$venv_stamp"
}

venv_main() {
  if ! venv_is_sound || ! venv_is_wanted; then
    venv_create
  fi
  # an environment for tests is one for training too
  if [[ $(cat "$venv_stamp" 2>/dev/null) != "$(venv_digest)"?( tests) ]]; then
    venv_install
  fi
}

# One script at a time: the lock is on the folder itself, so it leaves no file behind.
if command -v flock >/dev/null; then
  exec 9<.
  flock -n 9 || { echo "waiting for another install in $PWD" >&2 && flock 9; }
fi
venv_main
exec 9<&-
