#!/usr/bin/env bash
# The whole job on built-in data, on the CPU: bash scripts/quickstart.sh [key=value ...]
# Needs Python 3.11 or newer and a package index, nothing else. Settings given here go over those of
# configs/quickstart.yaml; the results go to run.dir, seen from where the script is called.
set -euo pipefail
root="$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

run_dir=runs/quickstart
for setting in "$@"; do
  case "$setting" in
    run.dir=*) run_dir="${setting#run.dir=}" ;;
    *=*) ;;
    *)
      echo "error: '$setting' is not key=value; usage: bash scripts/quickstart.sh [key=value ...]" >&2
      exit 2
      ;;
  esac
done

bash "$root/scripts/install.sh"
"$root/.venv/bin/rlhf-jax" run "$root/configs/quickstart.yaml" "$@"

echo "results:"
for file in report.html rlhf_training_curves.png reward_comparison.png eval.json; do
  echo "  $run_dir/$file"
done
