#!/usr/bin/env bash
# Install this project into its .venv: bash scripts/install.sh [EXTRA,... [REQUIREMENT ...]]
# Does nothing where that is done and pyproject.toml has not changed since. PYTHON=... picks the interpreter.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer with venv found${PYTHON:+ as PYTHON=$PYTHON};" \
    "install one (Debian and Ubuntu: python3 and python3-venv) or set PYTHON to it" >&2
  return 2
}

extras="${1:-}"
shift || true # what is left are further requirements for pip
stamp=.venv/rlhf_jax.installed
wanted="$(cksum <pyproject.toml) $extras"
installed="$(cat "$stamp" 2>/dev/null || true)"
if [[ $# -eq 0 && ("$installed" == "$wanted" || (-z "$extras" && "$installed" == "$wanted"*)) ]]; then
  exit 0
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python="$(find_python)"
  "$python" -m venv .venv
fi
echo "installing into $PWD/.venv (takes minutes the first time)" >&2
rm -f "$stamp"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}" "$@"
echo "$wanted" >"$stamp"
