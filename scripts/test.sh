#!/usr/bin/env bash
# Set up, lint, run all tests. Arguments are passed on: bash scripts/test.sh tests/data -k index
set -euo pipefail
source "$(dirname "$0")/setup.sh"
ruff check .
python -m pytest "$@"
