#!/usr/bin/env bash
# Prints a folder that has prometheus and promtool: where they are installed, else one under build/ into which Debian's
# package is unpacked without being installed (and so without a service that starts). Where neither can be had, the exit
# code is 1 and stderr begins with "skipped: ".
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  dirname "$(command -v prometheus)"
  exit
fi
prefix=$PWD/build/prometheus
if [ ! -f "$prefix/unpacked" ]; then
  skipped() {
    echo "skipped: Prometheus is not installed and $1; sudo apt-get install prometheus" >&2
    exit 1
  }
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    skipped "cannot be taken from Debian's packages, because there is no apt-get or no dpkg here"
  fi
  mkdir -p "$prefix/packages"
  # Two that need it at once fetch it one after the other.
  exec 8>"$prefix/lock"
  flock 8
  if [ -f "$prefix/unpacked" ]; then
    echo "$prefix/usr/bin"
    exit
  fi
  cd "$prefix/packages"
  if ! apt-get -q download prometheus >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then apt-get -q update >/dev/null 2>&1 || true; fi
    apt-get -q download prometheus >/dev/null 2>&1 || skipped "Debian's package cannot be downloaded"
  fi
  for package in *.deb; do dpkg -x "$package" "$prefix"; done
  touch "$prefix/unpacked"
fi
echo "$prefix/usr/bin"
