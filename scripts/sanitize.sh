#!/usr/bin/env bash
# sanitize.sh [address] [thread] [grid]: the C++ tests, built with the address and undefined-behaviour sanitizers and with
# the thread sanitizer. All where none is named. Ends with 1 when one of them found something.
#
#   address  address and undefined behaviour: all tests but those of the CUDA device
#   thread   data races, in what has threads: scheduler, cache and parsers have one; and kernels share their threads' work
#            in the same way whatever the instruction set is
#   grid     address and undefined behaviour: the tests of the CUDA device, whose kernels run on an emulated grid. (Its
#            threads are no threads but stacks, which the thread sanitizer does not follow.)
set -uo pipefail
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export PATH=$PWD/.venv/bin:$PATH

# sanitize NAME SANITIZERS CUDA_TESTS [ctest's arguments]
sanitize() {
  local googletest folder=build/sanitize-$1
  echo "== sanitizers: $2" >&2
  googletest=$(scripts/get_googletest.sh) &&
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1" -DCHARONIA_TESTS=ON \
      -DCHARONIA_WERROR=OFF -DCHARONIA_PYTHON=OFF -DCHARONIA_TRITON=OFF -DCHARONIA_CUDA=OFF "-DCHARONIA_SANITIZE=$2" \
      "-DCHARONIA_CUDA_ON_HOST_TESTS=$3" -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
      -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING &&
    cmake --build "$folder" --parallel "$(nproc)" &&
    mkdir -p "$folder/files" &&
    TEST_TMPDIR=$PWD/$folder/files ctest --test-dir "$folder" --output-on-failure --progress --parallel "$(nproc)" "${@:4}"
}

[ $# -gt 0 ] || set -- address thread grid
failed=()
for one in "$@"; do
  case $one in
    address) sanitize address address,undefined OFF || failed+=("$one") ;;
    grid) sanitize grid address,undefined ON -R '^on_host' || failed+=("$one") ;;
    thread)
      sanitize thread thread OFF -R '^(Device|Ranks|Isa|Kinds|ThreadPool|LocalGroup|EngineRanks|DecoderMemory)' \
        -E '/(portable|avx2)' || failed+=("$one")
      ;;
    *)
      echo "sanitize.sh: $one is none of address, thread, grid" >&2
      exit 2
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || echo "== sanitizers that found something: ${failed[*]}" >&2
[ ${#failed[@]} -eq 0 ]
