#!/usr/bin/env bash
# Makes .venv, then runs the linters and the tests, two at a time. Arguments go to pytest.
#
#   bash scripts/test.sh              # quick: each recipe under its own strategy, each strategy once
#   bash scripts/test.sh --matrix     # every recipe under every strategy; writes docs/strategy_matrix.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SECONDS=0
source scripts/environment.sh
make_environment
echo "environment ready after $SECONDS s"
workers=()
if python -c 'import xdist' 2>/dev/null; then # the environment has pytest-xdist
    workers=(-n 2 --dist loadfile --no-loadscope-reorder)
fi
status=0
ruff check . || status=1
ruff format --check . || status=1
python -m pytest "${workers[@]}" "$@" || status=1
echo "scripts/test.sh took $SECONDS s" >&2
exit "$status"
