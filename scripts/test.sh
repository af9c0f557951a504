#!/usr/bin/env bash
# All checks and tests. Each part runs even when one before it failed; the exit code says whether all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
export PATH="$bin:$PATH"
failed=()

part() {
  echo "== $1" >&2
  "${@:2}" || failed+=("$1")
}

cpp_tests() {
  local googletest
  googletest=$(scripts/get_googletest.sh) || return
  cmake -S . -B build/tests -G Ninja -DCMAKE_BUILD_TYPE=Release -DCHARONIA_TESTS=ON -DCHARONIA_WERROR=ON \
    -DCHARONIA_PYTHON=OFF -DCHARONIA_TRITON=OFF -DPython_EXECUTABLE="$bin/python" \
    -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING &&
    cmake --build build/tests --parallel "$(nproc)" &&
    ctest --test-dir build/tests --output-on-failure --progress
}

part "ruff check" ruff check .
part "ruff format" ruff format --check .
part "mypy" mypy charonia client/charonia_client gateway/charonia_gateway preprocessing/prompt.py postprocessing/detokenize.py
part "C++ tests" cpp_tests
[ ${#failed[@]} -eq 0 ] || echo "== failed so far: ${failed[*]}" >&2
part "pytest" pytest tests
[ ${#failed[@]} -eq 0 ]
