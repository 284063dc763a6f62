#!/usr/bin/env bash
# Install into .venv (made if missing) and run the tests; arguments go to pytest: bash scripts/test.sh --slow
# RLHF_JAX_TORCH=1 also installs torch, for the parity tests, which are skipped where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old; set PYTHON to a Python 3.11 or newer" >&2
    exit 2
  }
  "$python" -m venv .venv
fi

extras="test"
if [ "${RLHF_JAX_TORCH:-0}" = 1 ]; then
  extras="test,torch"
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
exec .venv/bin/python -m pytest "$@"
