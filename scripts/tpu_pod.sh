#!/usr/bin/env bash
# The same command on every host of a Cloud TPU pod: bash scripts/tpu_pod.sh TPU_NAME ZONE COMMAND CONFIG.yaml [key=value ...]
# The repository lies in ~/rlhf_jax on each host, with `bash scripts/install.sh tpu` done there; run.dir is gs://.
# The processes find each other through the pod's metadata. DRY_RUN=1 prints the command instead of running it.
set -euo pipefail

if [[ $# -lt 4 ]]; then
  echo "usage: bash scripts/tpu_pod.sh TPU_NAME ZONE COMMAND CONFIG.yaml [key=value ...]" >&2
  exit 2
fi
name="$1" zone="$2"
shift 2
printf -v command ' %q' .venv/bin/rlhf-jax --pod "$@"
run=(gcloud compute tpus tpu-vm ssh "$name" "--zone=$zone" --worker=all "--command=cd rlhf_jax &&$command")
if [[ -n "${DRY_RUN:-}" ]]; then
  printf '%q ' "${run[@]}"
  echo
else
  exec "${run[@]}"
fi
