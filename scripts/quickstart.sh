#!/usr/bin/env bash
# Trains a small Llama on 8 CPU processes, with data, tensor and pipeline parallelism, in the .venv
# that it makes when there is none. Each call is a new run; arguments are settings:
#   scripts/quickstart.sh train.steps=1000 pipeline.schedule=zb_h1
#   scripts/quickstart.sh --resume           goes on with the last of these runs
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

folder=runs
name=quickstart-$(date +%Y%m%d-%H%M%S)
trains=yes
resumes=no
named=no
config=configs/quickstart.yaml
settings=()
for argument in "$@"; do
  case $argument in
    --resume) resumes=yes && continue ;;
    run.folder=*) folder=${argument#*=} ;;
    run.name=*) name=${argument#*=} named=yes ;;
    --dry-run | --help | -h) trains=no ;;
  esac
  settings+=("$argument")
done
if [[ $resumes == yes ]]; then
  if [[ $named == no ]]; then
    for run in "$folder"/quickstart-*; do name=${run##*/}; done # the last by name is the newest
  fi
  # the settings of its last start, which were written last
  config=$(ls -t "$folder/$name"/config*.yaml 2>/dev/null | head -n 1) || true
  [[ -n $config ]] || venv_die "--resume: no run has begun in $folder/$name"
fi

export OMP_NUM_THREADS=1
.venv/bin/python -m megapipe.launch --nproc 8 \
  train.py "$config" "run.name=$name" ${settings[@]+"${settings[@]}"}
if [[ $trains == yes ]]; then
  summary=$(.venv/bin/python -m megapipe summary "$folder/$name")
  printf '\nIts text:\n\n'
  .venv/bin/python -m megapipe generate "$folder/$name" \
    --prompt "class " --max-new-tokens 300 --temperature 0.5
  printf '\n%s\n' "$summary"
fi
