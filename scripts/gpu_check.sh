#!/usr/bin/env bash
# Builds the engine with CUDA on a machine with a GPU, tests it and measures it (`--help`, docs/gpu_testing.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "$python" -u scripts/gpu_check.py "$@"
