#!/usr/bin/env bash
# Builds the engine with CUDA on a machine with a GPU, tests it there, measures it and writes one file of results.
#
#   scripts/gpu_check.sh call1               what is wanted first, in nine minutes; it says what to run next
#   scripts/gpu_check.sh build ops bench1    these stages (--list says which there are)
#   scripts/gpu_check.sh --rehearse          every call on a machine without a GPU, with tiny models
#   scripts/gpu_check.sh --pack .whl --build-for 90a    compiles here what is run there
#   scripts/gpu_check.sh --help              all options, and what to bring along to a machine without a network
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
PYTHONPATH="$PWD/scripts/gpu_check/site:$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -u -m gpu_check "$@"
