#!/usr/bin/env bash
# get_clients.sh [--there]: prints the Python of an environment with the libraries in scripts/requirements-clients.txt, which
# it creates under build/ if needed. --there: prints nothing, and fails if the environment does not exist.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/clients
wanted=scripts/requirements-clients.txt

is_there() { [ -x "$folder/bin/python" ] && cmp -s "$wanted" "$folder/made-of"; }

if ! is_there; then
  if [ "${1:-}" = --there ]; then exit 1; fi
  mkdir -p build
  exec 8>build/clients.lock
  flock 8
  if ! is_there; then
    .venv/bin/python -m venv --clear --without-pip "$folder" >&2
    .venv/bin/python scripts/install.py --into "$folder/bin/python" --requirement "$wanted" >&2
    cp "$wanted" "$folder/made-of"
  fi
fi
echo "$folder/bin/python"
