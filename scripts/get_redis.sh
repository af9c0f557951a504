#!/usr/bin/env bash
# Prints the path of a Valkey or Redis server: the installed program, otherwise Debian's package, which root installs in
# continuous integration (CI=true). If there is none, the exit code is 1 and stderr starts with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
find_program valkey-server redis-server -- redis-server && exit
echo "skipped: neither valkey-server nor redis-server is installed; sudo apt-get install redis-server" >&2
exit 1
