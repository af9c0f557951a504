#!/usr/bin/env bash
# sanitize.sh [address] [thread] [grid]: builds and runs the C++ tests with the address and undefined-behaviour sanitizers and
# with the thread sanitizer; all three by default. Exit code 1 if one of them finds an error.
#
#   address  address and undefined behaviour: all tests except the tests of the CUDA device
#   thread   data races, in modules with threads (scheduler, cache and parsers have one thread)
#   grid     address and undefined behaviour: the kernels of the CUDA device on an emulated grid, and one step of the whole
#            device. (The grid's threads are stacks that the thread sanitizer does not support.)
#
# Of the instruction sets only one is tested, the widest of AVX2 and AVX-512 that this processor has.
set -uo pipefail
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export PATH=$PWD/.venv/bin:$PATH
. scripts/use_ccache.sh
. scripts/gtest.sh

# With sanitizers, kernels take about 12 times as long. So tests with whole engines and the slowest tests are excluded. The
# list keeps tests of attention and experts that take only seconds.
grid_tests=('HostGrid*' 'HostAsync*' 'Hopper*' 'TensorMap*' 'Mode/*' 'Runtime*' 'Collective*' 'GrowingMemory*' 'Gemm*'
  'QuantBits/Rotary*' 'Device/RowsTest.*/cuda'
  'CudaExpertsTest.nan_logits*' 'CudaAttentionTest.tiles_in*' 'CudaAttentionTest.decodes_of_many*' 'CudaAttentionTest.groups_that_fit*'
  'CudaAttentionTest.decodes_with_one_split*' 'CudaAttentionTest.any_head_size*' 'CudaQuantTest.all_tactics*' 'DequantisedTest.*'
  'IntegerPartsTest.*')
grid_long=('*an_unknown_file*' '*measurements_are_stored*' '*concurrent_writers*' '*every_tactic_computes_the_gemm*'
  '*right_kernels_of*' '*wrong_kernels_always*' '*ordered_gemms*')
thread_tests=('Device*' 'Ranks*' 'Isa*' 'ThreadPool*' 'ProcessGroup*' 'EngineRanks*' 'DecoderMemory*' 'MaskThreads*' 'KvFiles*'
  'SessionFiles*' 'Methods/SpeculationTest.R*_asynchronous')
if grep -qw avx512dq /proc/cpuinfo; then
  other_isas='*/portable*:*/avx2*:*/avx512_bf16*'
else
  other_isas='*/portable*:*/avx512*:*/amx*'
fi

# sanitize FOLDER SANITIZERS PROGRAM EXCLUDED PATTERN...: builds the program, and runs the tests that match a pattern. Fails if
# EXCLUDED leaves no test of a pattern. Kernels that cannot run here are not compiled.
sanitize() {
  local googletest folder=build/sanitize-$1 program excluded=()
  echo "== sanitizers: $2" >&2
  googletest=$(scripts/get_googletest.sh) &&
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1" -DCHARONIA_TESTS=ON \
      -DCHARONIA_WERROR=OFF -DCHARONIA_KERNELS=here -DCHARONIA_UNITY=ON -DCHARONIA_PYTHON=OFF -DCHARONIA_TRITON=OFF -DCHARONIA_CUDA=OFF "-DCHARONIA_SANITIZE=$2" \
      -DCHARONIA_CUDA_ON_HOST_TESTS=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
      -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING &&
    cmake --build "$folder" --parallel "$(nproc)" --target "$3" || return
  program=$(find "$folder" -name "$3" -type f) &&
    { [ "$3" = charonia_tests ] || IFS=: read -ra excluded <<<"$4"; } &&  # other instruction sets have no tests here
    gtest_has "$program" '' "${excluded[@]}" &&
    gtest_has "$program" "$4" "${@:5}" &&
    gtest_shards "$program" "$(gtest_join "${@:5}")" "$4" "$PWD/$folder/files"
}

[ $# -gt 0 ] || set -- address thread grid
failed=()
for one in "$@"; do
  case $one in
    address) sanitize address address,undefined charonia_tests "$other_isas" '*' || failed+=("$one") ;;
    grid)
      # It uses the engine that `address` builds.
      sanitize address address,undefined charonia_cuda_tests_on_host "$(gtest_join "${grid_long[@]}")" "${grid_tests[@]}" || failed+=("$one")
      ;;
    thread)
      sanitize thread thread charonia_tests "$other_isas" "${thread_tests[@]}" || failed+=("$one")
      ;;
    *)
      echo "sanitize.sh: unknown sanitizer $one; expected address, thread or grid" >&2
      exit 2
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || echo "== sanitizers that found errors: ${failed[*]}" >&2
[ ${#failed[@]} -eq 0 ]
