#!/usr/bin/env bash
# All checks and tests. Each part runs even when one before it failed; the exit code says whether all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
export PATH="$bin:$PATH"
failed=()
cuda_settings=(-DCHARONIA_CUDA=OFF)

part() {
  echo "== $1" >&2
  "${@:2}" || failed+=("$1")
}

configure() {
  local googletest
  googletest=$(scripts/get_googletest.sh) || return
  cmake -S . -B build/tests -G Ninja -DCMAKE_BUILD_TYPE=Release -DCHARONIA_TESTS=ON -DCHARONIA_WERROR=ON \
    -DCHARONIA_PYTHON=OFF -DCHARONIA_TRITON=OFF -DPython_EXECUTABLE="$bin/python" \
    -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING "${cuda_settings[@]}"
}

# For all compute capabilities, warnings as errors; and no kernel spills registers. The tests of the device are among the
# C++ tests where there is a GPU.
cuda_compiles() {
  local headers device_tests=OFF
  headers=$(scripts/get_cuda_headers.sh) || return
  if scripts/cuda_here.sh gpu; then device_tests=ON; fi
  cuda_settings=(-DCHARONIA_CUDA=ON "-DCHARONIA_CUDA_HEADERS=$headers" -DCHARONIA_CUDA_DEVICE_TESTS=$device_tests)
  configure || {
    cuda_settings=(-DCHARONIA_CUDA=OFF)
    return 1
  }
  cmake --build build/tests --parallel "$(nproc)" --target charonia_cuda charonia_cuda_links &&
    python scripts/check_spills.py build/tests/CMakeFiles/charonia_cuda.dir
}

# TEST_TMPDIR: the tests' files are of this checkout, so that two may be tested at once.
cpp_tests() {
  configure &&
    cmake --build build/tests --parallel "$(nproc)" &&
    mkdir -p build/tests/files &&
    TEST_TMPDIR=$PWD/build/tests/files ctest --test-dir build/tests --output-on-failure --progress --parallel "$(nproc)"
}

part "ruff check" ruff check .
part "ruff format" ruff format --check .
part "mypy" mypy charonia scripts/gpu_check client/charonia_client gateway/charonia_gateway preprocessing/prompt.py postprocessing/detokenize.py model_repository/model_log.py
part "mypy of dashboards" mypy -p monitoring.dashboards --python-version 3.11
part "mypy of benchmarks" mypy -p benchmarks.cpu_peers --exclude workers
if nvcc=$(scripts/cuda_here.sh nvcc); then
  export CUDACXX=$nvcc
  part "CUDA compiles" cuda_compiles
else
  echo "== CUDA compiles: skipped, there is no nvcc here (CUDA toolkit 12.8 or newer)" >&2
fi
part "C++ tests" cpp_tests
[ ${#failed[@]} -eq 0 ] || echo "== failed so far: ${failed[*]}" >&2
# The containers' tests build images: `make test-docker`.
part "pytest" pytest tests --ignore tests/docker
[ ${#failed[@]} -eq 0 ]
