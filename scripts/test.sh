#!/usr/bin/env bash
# All checks and tests except the sanitizers and the tests of containers and of released models. In continuous integration
# (CI=true) a missing tool is a failure.
#
# CHARONIA_TEST_CUDA_ARCHITECTURES   what nvcc compiles for; unset: one GPU architecture, two with CI=true
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
export PATH="$bin:$PATH"
. scripts/use_ccache.sh
. scripts/stages.sh
cuda_settings=(-DCHARONIA_CUDA_CHECK=OFF)

# The build folder of the engine, with the tests in it.
configure() {
  local googletest orders=2
  googletest=$(scripts/get_googletest.sh) || return
  if [ "${CI:-}" = true ]; then orders="2;3"; fi
  cmake -S . -B build/engine -DCHARONIA_TESTS=ON "-DCHARONIA_CUDA_ON_HOST_ORDERS=$orders" -DCMAKE_PREFIX_PATH="$googletest" \
    --log-level=WARNING "${cuda_settings[@]}"
}

build() { cmake --build build/engine --parallel "$(nproc)" "$@"; }

# Warnings are errors, and no kernel spills registers. The tests of the device are among the C++ tests where there is a GPU.
cuda_compiles() {
  local headers targets=(charonia_cuda charonia_cuda_links) device_tests=OFF architectures=${CHARONIA_TEST_CUDA_ARCHITECTURES:-}
  headers=$(scripts/get_cuda_headers.sh) || return
  if scripts/cuda_here.sh gpu; then device_tests=ON; fi
  if [ "${CI:-}" = true ]; then
    # Their sources are compiled and run on the emulated device in any case; here, that they are for a GPU too.
    targets+=(charonia_cuda_kernels charonia_cuda_tests)
    # PTX 9.0 has the source of 9.0a, of which no kernel asks for what it alone has; 8.9 has bounds of 8.0.
    architectures=${architectures:-80-real;90a-real}
  elif [ -z "$architectures" ]; then
    architectures=90a-real
  fi
  cuda_settings=(-DCHARONIA_CUDA_CHECK=ON "-DCHARONIA_CUDA_HEADERS=$headers" -DCHARONIA_CUDA_DEVICE_TESTS=$device_tests
    ${architectures:+"-DCHARONIA_CUDA_ARCHITECTURES=$architectures"})
  configure && build --target "${targets[@]}" &&
    python scripts/check_spills.py build/engine/CMakeFiles/charonia_cuda.dir
}

cpp_build() { configure && build; }

# TEST_TMPDIR: the tests' files are of this checkout, so that two may be tested at once.
cpp_tests() {
  mkdir -p build/engine/files &&
    TEST_TMPDIR=$PWD/build/engine/files ctest --test-dir build/engine --no-tests=error --output-on-failure --progress --parallel "$(nproc)"
}

mypy_all() {
  mypy charonia scripts/gpu_check client/charonia_answers client/charonia_client client/examples gateway/charonia_gateway postprocessing/detokenize.py \
    model_repository/model_log.py &&
    MYPYPATH=charonia/text:client mypy preprocessing/prompt.py preprocessing/context_length.py preprocessing/model_fingerprint.py \
      preprocessing/parsing_options.py preprocessing/answer_guide.py preprocessing/prepare.py preprocessing/special_tokens.py &&
    MYPYPATH=client:postprocessing mypy parsing/parse.py &&
    mypy -p definitions --python-version 3.11 &&
    mypy monitoring/grafana/dashboards.py --python-version 3.11 &&
    mypy -p benchmarks --exclude workers
}

# Workers wait for servers as much as they compute. A file's tests run in one process, which starts its servers once. In the
# order of the folders: files of tests/unit, which are short, come last, so that all processes end at about the same time.
python_tests() {
  pytest tests --ignore tests/docker --ignore tests/released -n "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder --durations 15 -rfEs
}

# Says early what cannot be imported. And the bytecode is there when the processes of the tests begin, each of which would
# compile all of it at the same time as the others.
tests_collected() { pytest tests --ignore tests/docker --ignore tests/released --collect-only -qqq | sed '/^tests.*: [0-9]*$/d'; }

stage "ruff check" ruff check .
stage "ruff format" ruff format --check .
# One thread each, beside the compilers.
stage_beside "mypy" mypy_all
stage_beside "collection of the tests" tests_collected
# Tests of the stack run what people write clients with, in an environment of its own.
if [ "${CI:-}" = true ]; then
  stage_beside "libraries of clients" scripts/get_clients.sh
elif ! scripts/get_clients.sh --there >/dev/null; then
  left_out "libraries of clients" "\`make test-clients\` gets LangChain, instructor and the agents SDK (240 MB), and tests them"
fi
if CUDACXX=$(scripts/cuda_here.sh nvcc); then
  export CUDACXX
  stage "CUDA compiles" cuda_compiles
else
  left_out "CUDA compiles" "there is no nvcc here (CUDA toolkit 12.8 or newer)"
fi
stage "C++ compiles" cpp_build
stage "C++ tests" cpp_tests
stage "tests of a GPU, on the emulated device" env "PYTHON=$bin/python" scripts/gpu_check.sh --emulated build/engine
join_stages
stage "pytest" python_tests
end_of_stages
