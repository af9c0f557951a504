#!/usr/bin/env bash
# Prints the program of a Valkey or Redis server: the installed one; else Debian's package, which root installs in continuous
# integration (CI=true). Where none can be had, the exit code is 1 and stderr begins with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
find_program valkey-server redis-server -- redis-server && exit
echo "skipped: neither valkey-server nor redis-server is here; sudo apt-get install redis-server" >&2
exit 1
