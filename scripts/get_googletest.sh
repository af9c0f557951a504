#!/usr/bin/env bash
# Prints a prefix with GoogleTest for CMake: /usr where it is installed, else one under build/ into which Debian's
# package is unpacked without being installed.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -f /usr/include/gtest/gtest.h ] && compgen -G '/usr/lib/*/libgtest.a' >/dev/null; then
  echo /usr
  exit
fi
prefix=$PWD/build/googletest
if [ ! -f "$prefix/unpacked" ]; then
  mkdir -p "$prefix/packages"
  cd "$prefix/packages"
  fetch() { apt-get -q download libgtest-dev libgmock-dev >&2; }
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "GoogleTest is needed for the C++ tests: install its development package" >&2
    exit 1
  fi
  if ! fetch 2>/dev/null; then
    if [ "$(id -u)" = 0 ]; then apt-get -q update >&2; fi
    fetch || {
      echo "GoogleTest is needed for the C++ tests and cannot be downloaded: sudo apt-get install libgtest-dev" >&2
      exit 1
    }
  fi
  for package in *.deb; do dpkg -x "$package" "$prefix"; done
  touch "$prefix/unpacked"
fi
echo "$prefix/usr"
