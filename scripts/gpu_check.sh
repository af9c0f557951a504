#!/usr/bin/env bash
# Builds the engine with CUDA on a machine with a GPU, tests it and measures it (`--help`, docs/gpu_testing.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -u scripts/gpu_check.py "$@"
