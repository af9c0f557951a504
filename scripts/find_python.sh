#!/usr/bin/env bash
# Prints a Python from 3.10 to 3.12: $PYTHON if set, otherwise python3, otherwise another installed one.
set -euo pipefail
supported() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
  if supported "$candidate"; then
    command -v "$candidate"
    exit
  fi
done
first=${PYTHON:-python3}
if version=$("$first" --version 2>/dev/null); then
  echo "$first is $version; Python 3.10, 3.11 or 3.12 is needed (Triton's Python models need NumPy 1, which has no other)." >&2
else
  echo "$first was not found; Python 3.10, 3.11 or 3.12 is needed: sudo apt-get install python3" >&2
fi
echo "Install one of them and name it: PYTHON=/path/to/python3.12 make ..." >&2
exit 1
