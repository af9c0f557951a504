#!/usr/bin/env bash
# Prints the folders with cublasLt.h and nccl.h, separated by a semicolon, for CMake's CHARONIA_CUDA_HEADERS: folders of the
# CUDA toolkit or of installed Python packages; otherwise headers from PyPI's wheels, under build/cuda_headers. The wheels
# also contain the libraries (about 700 MB) and are deleted afterwards. Only the build needs the headers.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=docker/requirements/cuda.txt
python=.venv/bin/python
[ -x "$python" ] || python=python3

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# find_header NAME FOLDER...: prints the first folder with this file
find_header() {
  local name=$1 folder
  shift
  for folder in "$@"; do
    if [ -f "$folder/$name" ]; then
      echo "$folder"
      return
    fi
  done
  return 1
}

# fetch PACKAGE TARGET: copies the headers of a wheel to build/cuda_headers/<TARGET>
fetch() {
  local target=build/cuda_headers/$2 work pin
  pin=$(sed -n "/^$1==/,/[^\\\\]$/p" "$pins")  # with its checksums
  if [ "$(cat "$target/fetched" 2>/dev/null)" = "$pin" ]; then return; fi
  echo "get_cuda_headers: downloading $1 for its headers" >&2
  mkdir -p build/cuda_headers
  work=$(mktemp -d build/cuda_headers/download.XXXXXX)
  echo "$pin" >"$work/pin"
  if ! "$python" -m pip --disable-pip-version-check --no-input --quiet download --no-deps --only-binary :all: \
    --dest "$work" --require-hashes --requirement "$work/pin" >&2; then
    rm -rf "$work"
    echo "get_cuda_headers: cannot download $1; install the toolkit's development package instead" >&2
    return 1
  fi
  "$python" - "$work" "$target" <<'PYTHON'
import sys, zipfile
from pathlib import Path

work, target = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    for name in wheel.namelist():
        before, found, rest = name.partition("/include/")
        if found and rest and not rest.endswith("/"):
            (target / rest).parent.mkdir(parents=True, exist_ok=True)
            (target / rest).write_bytes(wheel.read(name))
PYTHON
  rm -rf "$work"
  echo "$pin" >"$target/fetched"
}

if ! cublas=$(find_header cublasLt.h "$toolkit/include" "$toolkit"/targets/*/include "$packages/nvidia/cu13/include"); then
  fetch nvidia-cublas cublas
  cublas=$PWD/build/cuda_headers/cublas
fi
if ! nccl=$(find_header nccl.h "$toolkit/include" "$toolkit"/targets/*/include /usr/include "$packages/nvidia/nccl/include"); then
  fetch nvidia-nccl-cu13 nccl
  nccl=$PWD/build/cuda_headers/nccl
fi
echo "$cublas;$nccl"
