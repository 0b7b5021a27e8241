#!/usr/bin/env bash
# Set up, lint, run all tests: on all cores, and then one at a time those that measure the machine.
# Arguments are passed on: bash scripts/test.sh tests/data -k index
set -euo pipefail
source "$(dirname "$0")/setup.sh"
ruff check .

run() {  # pytest's exit code; 5, where nothing was chosen, is one that the other half may make good
    local code=0
    python -m pytest "$@" || code=$?
    ((code == 0 || code == 5)) || exit "$code"
    chosen=$((chosen + (code == 0)))
}

chosen=0
run -n auto --dist worksteal -m "not alone" "$@"
run -m alone "$@"
((chosen)) || exit 5
