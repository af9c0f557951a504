#!/usr/bin/env bash
# sanitize.sh [address] [thread] [grid]: builds and runs the C++ tests with the address and undefined-behaviour sanitizers and
# with the thread sanitizer; all three by default. Exit code 1 if one of them finds an error.
#
#   address  address and undefined behaviour: all tests except the tests of the CUDA device
#   thread   data races, in modules with threads (scheduler, cache and parsers have one thread); only one instruction set,
#            because kernels use threads in the same way for all
#   grid     address and undefined behaviour: the kernels of the CUDA device on an emulated grid, and one step of the whole
#            device. (The grid's threads are stacks that the thread sanitizer does not support.)
set -uo pipefail
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export PATH=$PWD/.venv/bin:$PATH
. scripts/use_ccache.sh

# With sanitizers, kernels take about 12 times as long. So tests with whole engines and the slowest tests are excluded. The
# list keeps tests of attention and experts that take only seconds.
grid_tests=(HostGrid Mode/ Runtime Collective GrowingMemory Gemm QuantBits/Rotary 'Device/RowsTest\..*/cuda'
  'CudaExpertsTest\.nan_logits' 'CudaAttentionTest\.tiles_in' 'CudaAttentionTest\.decodes_of_many' 'CudaAttentionTest\.groups_that_fit'
  'CudaAttentionTest\.decodes_with_one_split' 'CudaAttentionTest\.any_head_size' 'CudaQuantTest\.all_tactics' 'DequantisedTest\.')
grid_long=(an_unknown_file measurements_are_stored concurrent_writers every_tactic_computes_the_gemm order_ immediate)
thread_tests=(Device Ranks Isa ThreadPool ProcessGroup EngineRanks DecoderMemory MaskThreads)

# Tests of other instruction sets than one that this machine supports.
if grep -qw avx512dq /proc/cpuinfo; then
  other_isas='/(portable|avx2|avx512_bf16)(_int[48])?$'
else
  other_isas='/(portable|avx512|avx512_bf16|amx)(_int[48])?$'
fi

joined() { local IFS='|'; echo "($*)"; }

# sanitize FOLDER SANITIZERS TARGET [PATTERN...]: the tests whose names begin with a pattern and contain none of `left_out`; without
# patterns, all tests but the tests of the CUDA device. Fails if a pattern, or one of `left_out`, is no longer part of a name. Kernels that cannot
# run here are not compiled.
sanitize() {
  local googletest names one unity=ON folder=build/sanitize-$1 selection=(-E '^(on_host|charonia_cuda)')
  echo "== sanitizers: $2" >&2
  googletest=$(scripts/get_googletest.sh) &&
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1" -DCHARONIA_TESTS=ON \
      -DCHARONIA_WERROR=OFF -DCHARONIA_KERNELS=here -DCHARONIA_UNITY=$unity -DCHARONIA_PYTHON=OFF -DCHARONIA_TRITON=OFF -DCHARONIA_CUDA=OFF "-DCHARONIA_SANITIZE=$2" \
      -DCHARONIA_CUDA_ON_HOST_TESTS=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
      -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING &&
    cmake --build "$folder" --parallel "$(nproc)" --target "$3" || return
  if [ $# -gt 3 ]; then
    names=$(ctest --test-dir "$folder" -N | sed -nE 's/^ *Test *#[0-9]+: (on_host\.)?//p')
    for one in "${@:4}"; do grep -qE "^$one" <<<"$names" || { echo "sanitize.sh: no test begins with $one" >&2; return 1; }; done
    for one in "${left_out[@]}"; do grep -qE "$one" <<<"$names" || { echo "sanitize.sh: no test contains $one" >&2; return 1; }; done
    selection=(-R "^(on_host\.)?$(joined "${@:4}")" -E "$(joined "${left_out[@]}")")
  fi
  mkdir -p "$folder/files" &&
    TEST_TMPDIR=$PWD/$folder/files ctest --test-dir "$folder" --no-tests=error --output-on-failure --progress --parallel "$(nproc)" "${selection[@]}"
}

[ $# -gt 0 ] || set -- address thread grid
failed=()
for one in "$@"; do
  case $one in
    address) sanitize address address,undefined charonia_tests || failed+=("$one") ;;
    grid)
      # It uses the engine that `address` builds.
      left_out=("${grid_long[@]}")
      sanitize address address,undefined charonia_cuda_tests_on_host "${grid_tests[@]}" || failed+=("$one")
      ;;
    thread)
      left_out=("$other_isas")
      sanitize thread thread charonia_tests "${thread_tests[@]}" || failed+=("$one")
      ;;
    *)
      echo "sanitize.sh: unknown sanitizer $one; expected address, thread or grid" >&2
      exit 2
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || echo "== sanitizers that found errors: ${failed[*]}" >&2
[ ${#failed[@]} -eq 0 ]
