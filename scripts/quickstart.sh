#!/usr/bin/env bash
# The main job on the embedded default data: set up, draw welds, train a small detector, judge it.
# Arguments are passed on: bash scripts/quickstart.sh seed=1
set -euo pipefail
source "$(dirname "$0")/setup.sh"
python -m weldtrain experiment=quickstart "$@"
