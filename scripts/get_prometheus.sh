#!/usr/bin/env bash
# Prints a folder with prometheus and promtool: the installed programs, otherwise Debian's package under build/. If there is
# none, the exit code is 1 and stderr starts with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
if command -v promtool >/dev/null && found=$(command -v prometheus); then
  dirname "$found"
elif unpack_packages "$PWD/build/prometheus" prometheus; then
  echo "$PWD/build/prometheus/usr/bin"
else
  echo "skipped: Prometheus is not installed and Debian's package cannot be downloaded; sudo apt-get install prometheus" >&2
  exit 1
fi
