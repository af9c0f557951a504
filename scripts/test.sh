#!/usr/bin/env bash
# test.sh fast   lint, types, the C++ tests with the kernels of this processor, and the Python tests marked `fast`
# test.sh all    everything else: CUDA, the emulated device, all instruction sets, sanitizers, and all other Python tests
#
# Runs stages and prints the seconds of each. In continuous integration (CI=true) a missing tool is a failure.
#
# CHARONIA_TEST_CUDA_ARCHITECTURES   GPU architectures that nvcc compiles for; default: 90a-real
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
. scripts/use_ccache.sh
. scripts/stages.sh
. scripts/gtest.sh

# configure CMAKE_ARGUMENTS...: configures the engine's build folder with tests. setup.sh has chosen the kernels.
configure() {
  local googletest
  googletest=$(scripts/get_googletest.sh) || return
  cmake -S . -B build/engine -DCHARONIA_TESTS=ON -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING "$@"
}

build() { cmake --build build/engine --parallel "$(nproc)" "$@"; }

mypy_all() {
  mypy charonia scripts/gpu_check.py scripts/gpu_check_torch.py client/charonia_answers client/charonia_client client/examples gateway/charonia_gateway postprocessing/detokenize.py \
    model_repository/model_log.py &&
    MYPYPATH=charonia/text:client mypy preprocessing/prompt.py preprocessing/context_length.py preprocessing/model_fingerprint.py \
      preprocessing/answer_formats.py preprocessing/answer_guide.py preprocessing/prepare.py &&
    mypy -p definitions --python-version 3.11 &&
    mypy monitoring/grafana/dashboards.py --python-version 3.11
}

cpp_build() { configure -DCHARONIA_CUDA_CHECK=OFF -DCHARONIA_CUDA_ON_HOST_TESTS=OFF && build --target charonia_tests; }

cpp_tests() {
  gtest_has build/engine/charonia_tests '' "${long_cpp_tests[@]}" &&
    gtest_shards build/engine/charonia_tests '*' "$(gtest_join "${long_cpp_tests[@]}")" "$PWD/build/engine/files"
}
# Tests that take more than one second each.
long_cpp_tests=('*OverlapTest*/2' '*Hostile*' '*a_decode_over_a_long_context*/portable'
  '*equals_attention_in_double*/portable' 'SessionFilesTest.OneEngineWrites*')

# Tests often wait for servers, hence two more processes than cores. All tests of a file, or of files with the same servers, run
# in one process.
run_pytest() {
  local workers
  workers=$(($(env -u OMP_NUM_THREADS nproc) + 2))  # nproc respects that variable
  pytest --dist loadfile --no-loadscope-reorder -n "$workers" --durations 30 -rfEs "$@"
}

fast() {
  stage "ruff check" ruff check .
  stage "ruff format" ruff format --check .
  stage_beside "mypy" mypy_all
  stage "C++ compiles" cpp_build
  stage "C++ tests" cpp_tests
  join_stages
  stage "pytest" run_pytest -m fast tests/unit tests/stack/test_smoke.py
}

# Warnings are errors, and the machine code must be as expected. On a machine with a GPU, the device's tests run on it.
cuda_compiles() {
  local headers device_tests=OFF targets=(charonia_cuda charonia_cuda_links charonia_cuda_test_kernels)
  headers=$(scripts/get_cuda_headers.sh) || return
  if scripts/cuda_here.sh gpu; then device_tests=ON targets+=(charonia_cuda_tests); fi
  # 90a also covers 9.0, which lacks only wgmma. 8.0, whose limits 8.9 has too, takes as long again.
  configure -DCHARONIA_CUDA_CHECK=ON "-DCHARONIA_CUDA_HEADERS=$headers" -DCHARONIA_CUDA_DEVICE_TESTS=$device_tests \
    "-DCHARONIA_CUDA_ARCHITECTURES=${CHARONIA_TEST_CUDA_ARCHITECTURES:-90a-real}" &&
    build --target "${targets[@]}" &&
    python scripts/check_machine_code.py build/engine/CMakeFiles/charonia_cuda.dir \
      build/engine/engine/tests/CMakeFiles/charonia_cuda_test_kernels.dir
}

all_cpp_build() { configure -DCHARONIA_CUDA_ON_HOST_TESTS=ON && build; }

# --timeout: of one program, which takes up to three minutes on two cores. Only a hang takes two hours.
all_cpp_tests() {
  TEST_TMPDIR=$PWD/build/engine/files ctest --test-dir build/engine --no-tests=error --output-on-failure --progress \
    --timeout 7200 --parallel "$(nproc)"
}

# Which of the longest stages run: the parts of sanitize.sh and the containers. Continuous integration runs one of them for each
# commit, which the commit's hash chooses.
long_stages() {
  local all=(address grid thread containers) commit
  if [ "${CI:-}" = true ] && commit=$(git rev-parse --short=7 HEAD 2>/dev/null); then
    echo "${all[0x${commit:0:7} % 4]}"
  else
    echo "${all[@]}"
  fi
}

# Succeeds if a Docker engine with compose responds. Starts one with CHARONIA_TEST_DOCKER_UP if it is set.
docker_responds() {
  if ! docker info >/dev/null 2>&1 && [ -n "${CHARONIA_TEST_DOCKER_UP:-}" ]; then timeout 1200 $CHARONIA_TEST_DOCKER_UP >&2; fi
  docker info >/dev/null && docker compose version >/dev/null
}

# The models of these tests are small: PyTorch's threads would only compete for the cores.
other_python_tests() { OMP_NUM_THREADS=1 run_pytest -m "not fast and not docker" tests "${ignored[@]}"; }
ignored=()

all() {
  stage_beside "libraries of clients" scripts/get_clients.sh
  if reason=$(python scripts/get_released.py --probe 2>&1); then
    stage_beside "released models" python scripts/get_released.py
  else
    left_out "released models" "$reason"
    ignored+=(--ignore tests/released)
  fi
  if CUDACXX=$(scripts/cuda_here.sh nvcc); then
    export CUDACXX
    stage "CUDA compiles" cuda_compiles
  else
    left_out "CUDA compiles" "nvcc is not installed (CUDA toolkit 12.8 or newer)"
  fi
  stage "C++ compiles, all of it" all_cpp_build
  stage "C++ tests, all of them" all_cpp_tests
  stage "tests of a GPU, on the emulated device" env "PYTHON=$PWD/.venv/bin/python" scripts/gpu_check.sh --emulated build/engine
  long=$(long_stages)
  for one in ${long/containers/}; do stage "sanitizer: $one" scripts/sanitize.sh "$one"; done
  join_stages
  stage "pytest" other_python_tests
  if [[ $long != *containers ]]; then
    echo "== containers: not for this commit" >&2
  elif reason=$(docker_responds 2>&1 >/dev/null); then
    stage "containers" pytest -rs -m docker tests/docker
  else
    left_out "containers" "no Docker engine with compose responds: ${reason##*$'\n'}"
  fi
}

case ${1:-} in
  fast | all) "$1" ;;
  *)
    echo "usage: test.sh fast|all" >&2
    exit 2
    ;;
esac
end_of_stages
