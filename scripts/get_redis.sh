#!/usr/bin/env bash
# Prints the program of a Valkey or Redis server: the installed one; else Debian's package, which root installs in continuous
# integration (CI=true), without the service that comes with it. Where none can be had, the exit code is 1 and stderr begins
# with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
installed() {
  local name
  for name in valkey-server redis-server; do
    if command -v "$name"; then exit; fi
  done
}
installed
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  mkdir -p build
  # Two that need it at once install it one after the other.
  exec 8>build/redis.lock
  flock 8
  installed
  export DEBIAN_FRONTEND=noninteractive
  install() { apt-get -q install --yes --no-install-recommends redis-server >build/redis.log 2>&1; }
  install || { apt-get -q update >/dev/null 2>&1 && install; } || true
  service redis-server stop >/dev/null 2>&1 || true
  installed
fi
echo "skipped: neither valkey-server nor redis-server is here; sudo apt-get install redis-server" >&2
exit 1
