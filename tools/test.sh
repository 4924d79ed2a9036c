#!/usr/bin/env bash
# Lint, types and tests, in the same environment as the demo:  bash tools/test.sh [pytest arguments]
source "$(dirname "$0")/install.sh"
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 "$@"
