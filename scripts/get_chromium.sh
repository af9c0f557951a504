#!/usr/bin/env bash
# Prints the program of a Chromium: the installed one; else Debian's package, which root installs in continuous integration
# (CI=true). Where none can be had, the exit code is 1 and stderr begins with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
find_program chromium chromium-browser google-chrome google-chrome-stable -- chromium fonts-dejavu-core && exit
echo "skipped: there is no Chromium here; sudo apt-get install chromium" >&2
exit 1
