#!/usr/bin/env bash
# Prints the program of a Chromium: the installed one; else Debian's package, which root installs in continuous integration
# (CI=true). Where none can be had, the exit code is 1 and stderr begins with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
installed() {
  local name
  for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name"; then exit; fi
  done
}
installed
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  mkdir -p build
  # Two that need it at once install it one after the other.
  exec 8>build/chromium.lock
  flock 8
  installed
  export DEBIAN_FRONTEND=noninteractive
  install() { apt-get -q install --yes --no-install-recommends chromium fonts-dejavu-core >build/chromium.log 2>&1; }
  install || { apt-get -q update >/dev/null 2>&1 && install; } || true
  installed
fi
echo "skipped: there is no Chromium here; sudo apt-get install chromium" >&2
exit 1
