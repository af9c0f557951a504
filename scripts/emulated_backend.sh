#!/usr/bin/env bash
# Builds the Triton backend on the emulated CUDA device, which computes on the CPU and can be made to fail
# (CHARONIA_EMULATED_CUDA_FAULT, engine/src/ops/cuda/emulated/host_fault.h), in the build folder of the engine and its tests,
# and prints the library's path. For tests: it is slow, and no product.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH  # for its CMake: another version would compile all again
. scripts/use_ccache.sh
folder=build/engine
{
  googletest=$(scripts/get_googletest.sh)
  # What is there keeps its settings; a folder that is not is configured as `make setup` does.
  if [ -f "$folder/CMakeCache.txt" ]; then
    cmake -S . -B "$folder" -DCHARONIA_TESTS=ON -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING
  else
    bin=$PWD/.venv/bin
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCHARONIA_TESTS=ON -DCHARONIA_PYTHON=OFF \
      -DPython_EXECUTABLE="$bin/python" -DCMAKE_PREFIX_PATH="$googletest" --log-level=WARNING
  fi
  cmake --build "$folder" --parallel "$(nproc)" --target triton_charonia_emulated
} >&2
echo "$PWD/$folder/emulated_backend/libtriton_charonia.so"
