#!/usr/bin/env bash
# Prints a Python from 3.10 to 3.12: $PYTHON if set, otherwise python3, otherwise another installed one, otherwise a 3.12 that
# uv downloads to the user's folder. uv comes from PyPI if it is not installed.
set -euo pipefail
supported() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}
fetch() {
  local uv
  if ! uv=$(command -v uv); then
    "$1" -m venv --clear build/uv && build/uv/bin/python -m pip --disable-pip-version-check --quiet install uv || return
    uv=build/uv/bin/uv
  fi
  "$uv" python install 3.12 && "$uv" python find --python-preference only-managed 3.12
}
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
  if supported "$candidate"; then
    command -v "$candidate"
    exit
  fi
done
first=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && newer=$(python3 --version 2>/dev/null) &&
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 13))' 2>/dev/null; then
  echo "python3 is $newer, which is too new: uv downloads Python 3.12" >&2
  mkdir -p build
  if fetched=$(fetch python3 2>build/uv.log | tail -n 1) && supported "$fetched"; then
    echo "$fetched"
    exit
  fi
  tail -n 3 build/uv.log >&2
  echo "That failed (build/uv.log). python3-venv may be missing, or the network: UV_PYTHON_INSTALL_MIRROR names a mirror." >&2
fi
if version=$("$first" --version 2>/dev/null); then
  echo "$first is $version; Python 3.10, 3.11 or 3.12 is needed (Triton's Python models need NumPy 1, which has no other)." >&2
else
  echo "$first was not found; Python 3.10, 3.11 or 3.12 is needed: sudo apt-get install python3" >&2
fi
echo "Install one of them and name it: PYTHON=/path/to/python3.12 make ..." >&2
exit 1
