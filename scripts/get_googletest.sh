#!/usr/bin/env bash
# Prints a prefix with GoogleTest for CMake: /usr if it is installed, otherwise a folder under build/ with Debian's packages.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_program.sh
if [ -f /usr/include/gtest/gtest.h ] && compgen -G '/usr/lib/*/libgtest.a' >/dev/null; then
  echo /usr
  exit
fi
if ! unpack_packages "$PWD/build/googletest" libgtest-dev libgmock-dev; then
  echo "GoogleTest is needed for the C++ tests and cannot be downloaded: sudo apt-get install libgtest-dev" >&2
  exit 1
fi
echo "$PWD/build/googletest/usr"
