#!/usr/bin/env bash
# Lint, types and tests, in the same environment as the demo:  bash tools/test.sh [pytest arguments]
source "$(dirname "$0")/install.sh"
# Two processes share the cores: more threads in each would only wait for one another (6 min, not 2).
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 "$@"
