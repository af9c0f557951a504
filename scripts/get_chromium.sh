#!/usr/bin/env bash
# Prints the path of Chromium: the installed program, otherwise Debian's package, which root installs in continuous integration
# (CI=true). If there is none, the exit code is 1 and stderr starts with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
find_program chromium chromium-browser google-chrome google-chrome-stable -- chromium fonts-dejavu-core && exit
echo "skipped: Chromium is not installed; sudo apt-get install chromium" >&2
exit 1
