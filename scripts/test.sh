#!/usr/bin/env bash
# Install into .venv and run the tests; arguments go to pytest: bash scripts/test.sh --slow
# Tests that compare with PyTorch are skipped where it is missing: .venv/bin/python -m pip install torch
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh test
exec .venv/bin/python -m pytest "$@"
