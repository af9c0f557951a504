#!/usr/bin/env bash
# setup.sh serve|test|test-all: brings .venv up to date with this checkout, for `make serve`, `make test` or `make test-all`. It
# skips steps that are up to date, so it may run before every command.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:?serve, test or test-all}
stamps=.venv/stamps
mkdir -p build
exec 9>build/setup.lock
flock 9

say() { echo "setup: $*" >&2; }

# outdated STAMP PATH...: succeeds if the stamp is missing or older than a file under the paths. Files that the build writes do not
# count: they are newer than the start of the build.
outdated() {
  [ ! -e "$stamps/$1" ] ||
    [ -n "$(find "${@:2}" -type f ! -path '*/generated/*' ! -name '*.pyc' -newer "$stamps/$1" -print -quit)" ]
}

# done_at STAMP: sets the stamp to the start of the step. So the next run sees files that changed during the step.
begin() { touch build/step-began; }
done_at() { mkdir -p "$stamps" && touch -r build/step-began "$stamps/$1"; }

. scripts/use_ccache.sh

get_packages() { .venv/bin/python scripts/install.py "$@"; }

# CHARONIA_CUDA=ON or OFF: whether the engine is built with CUDA. If it is not set, the engine is built with CUDA if there
# are a GPU and nvcc, and only for this GPU.
cuda=${CHARONIA_CUDA:-auto}
architectures=
nvcc=$(scripts/cuda_here.sh nvcc || true)
if [ "$cuda" = auto ]; then
  cuda=OFF
  if scripts/cuda_here.sh gpu; then
    if [ -n "$nvcc" ]; then
      cuda=ON
      architectures=-DCHARONIA_CUDA_ARCHITECTURES=native
    else
      say "there is a GPU but no nvcc, so the engine is built for the CPU alone; for the GPU install NVIDIA's packages" \
        "cuda-nvcc-13-0 and cuda-cudart-dev-13-0 (or the whole CUDA toolkit, 12.8 or newer) and run this again"
    fi
  fi
fi

# CPU kernels are compiled only for this processor, except for `make test-all`, and if all kernels were compiled before.
kernels_built=$(cat "$stamps/kernels" 2>/dev/null || { [ ! -e "$stamps/engine" ] || echo all; })
kernels=all
if [ "$purpose" != test-all ] && [ "$kernels_built" != all ]; then
  kernels="native $(grep -m1 ^flags /proc/cpuinfo | grep -owE 'avx2|avx512vl|avx512dq|avx512_bf16|amx_bf16' | tr '\n' ' ' || true)"
fi

engine_settings() {
  local headers
  if [ "$cuda" = ON ]; then
    headers=$(scripts/get_cuda_headers.sh) || return
    # Quoted: the folders are separated by a semicolon.
    echo "-DCHARONIA_CUDA=ON $architectures '-DCHARONIA_CUDA_HEADERS=$headers'"
  else
    echo "-DCHARONIA_CUDA=OFF"
  fi
  echo "-DCHARONIA_KERNELS=${kernels%% *}"
}

# Two jobs may run in their own process groups, which this script kills when it exits.
progress= model=
trap 'for job in $progress $model; do kill -- -"$job" 2>/dev/null || true; done' EXIT

# with_progress COMMAND...: runs the command in its own process group and prints its progress every ten seconds, because compilers
# and installers print nothing, for minutes at the first run.
with_progress() {
  local began=$SECONDS rules=build/engine/build.ninja compiled all
  set -m
  "$@" &
  local pid=$!
  progress=$pid
  set +m
  while sleep 0.2 && kill -0 "$pid" 2>/dev/null; do
    (((SECONDS - began) % 10 == 9)) || continue
    if [ -e "$rules" ] && all=$(grep -cE '^build .*: (CXX|CUDA)_COMPILER_' "$rules"); then
      compiled=$(find build/engine -name '*.o' -newer build/step-began | wc -l)
      say "$((SECONDS - began)) s: $compiled files compiled, of at most $all"
    else
      say "$((SECONDS - began)) s: installing packages"
    fi
    sleep 1
  done
  progress=
  wait "$pid"
}

# Downloads and unpacks packages while the engine is compiled. If one job fails, the other job is stopped.
install_all() {
  local packages engine
  install_packages &
  packages=$!
  install_engine --no-deps --editable . --editable client --editable gateway &
  engine=$!
  wait -n && wait -n && return
  trap '' TERM
  kill -TERM 0
  wait "$packages" "$engine" || true
  return 1
}

install_packages() {
  local needed=build/dependencies-$purpose.txt
  get_packages --require-hashes --requirement docker/requirements/host.txt
  if [ "$purpose" = serve ]; then return; fi
  .venv/bin/python scripts/dependencies.py "$purpose" >"$needed"
  if [ "$purpose" = test-all ]; then
    get_packages --requirement "$needed" --requirement scripts/requirements-test-all.txt
    get_packages --no-deps --requirement scripts/requirements-test-alone.txt
  else
    get_packages --requirement "$needed"
  fi
}

# --no-build-isolation: the build folder under build/ stays valid, so only changed files are compiled.
install_engine() {
  local settings
  settings=$(engine_settings) || return
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} PATH="$PWD/.venv/bin:$PATH" \
    CUDACXX=$nvcc CMAKE_ARGS="${CMAKE_ARGS:-} ${settings//$'\n'/ }" \
    .venv/bin/python -m pip --disable-pip-version-check --no-input --quiet install --no-build-isolation "$@"
  mkdir -p "$stamps"
  echo "$cuda" >"$stamps/cuda"
  echo "$kernels" >"$stamps/kernels"
}

# The gateway can serve its API without the libraries of the page, so a missing network is not an error.
page_outdated() {
  outdated page gateway/package-lock.json scripts/get_page_libraries.py || [ ! -d gateway/charonia_gateway/page/libraries ]
}

# setting NAME: the value in the environment or in .env, as Charonia reads it.
setting() {
  if [ -n "${!1:-}" ]; then echo "${!1}"; else .venv/bin/dotenv -f .env get "$1" 2>/dev/null || true; fi
}

# Whether the default model is served. MODEL may be NAME=smollm2.
needs_smollm2() {
  local named
  [ "$purpose" = serve ] || return
  named=$(setting MODEL)
  named=${named##*=}
  [ -z "$named" ] || [ "${named// /}" = smollm2 ]
}

# Without the default model `make serve` serves the demo model, so a missing network is not an error.
get_smollm2() {
  if needs_smollm2; then .venv/bin/python scripts/get_smollm2.py --at-start || true; fi
}

if ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(scripts/find_python.sh)
  "$python" scripts/check_machine.py
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
elif [ ! -e "$stamps/packages" ]; then
  .venv/bin/python scripts/check_machine.py
fi

# Warnings are errors only in continuous integration. Elsewhere, this setting would compile everything again after
# `make serve`, and a newer compiler may have new warnings.
if [ "${CI:-}" = true ]; then
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DCHARONIA_WERROR=ON"
fi
sources=(pyproject.toml client/pyproject.toml gateway/pyproject.toml docker/requirements/build.txt docker/requirements/host.txt)
if outdated packages "${sources[@]}" ||
  { [ "$purpose" != serve ] && outdated "$purpose" "${sources[@]}" scripts/requirements-test*.txt; }; then
  begin
  say "installing packages and building the engine (the first time takes some minutes)"
  with_progress get_packages --require-hashes --requirement docker/requirements/build.txt
  page=
  if page_outdated; then
    .venv/bin/python scripts/get_page_libraries.py &
    page=$!
  fi
  if [ ! -e .env ] || [ -x .venv/bin/dotenv ]; then # otherwise .env cannot be read yet
    set -m
    get_smollm2 9>&- & # it may outlive a killed setup, so it does not hold the lock
    model=$!
    set +m
  fi
  with_progress install_all
  done_at packages
  done_at engine
  if [ -n "$page" ] && wait "$page"; then done_at page; fi
  if [ "$purpose" != serve ]; then done_at "$purpose"; fi
  if [ "$purpose" = test-all ]; then done_at test; fi
fi

if [ -z "${page:-}" ] && page_outdated; then
  begin
  if .venv/bin/python scripts/get_page_libraries.py; then done_at page; fi
fi

if [ -z "$model" ]; then
  get_smollm2
else
  if kill -0 "$model" 2>/dev/null; then say "waiting for the download of the default model"; fi
  while kill -0 "$model" 2>/dev/null; do sleep 0.2; done  # bash can lose a signal that comes when it begins to `wait`
  wait "$model" || true
  model=
fi

# Libraries that only the tests of the page need.
if [ "$purpose" = test-all ]; then .venv/bin/python scripts/get_page_libraries.py --tests || true; fi

if outdated engine engine cmake definitions CMakeLists.txt || [ "$(cat "$stamps/cuda" 2>/dev/null || echo OFF)" != "$cuda" ] ||
  [ "$(cat "$stamps/kernels" 2>/dev/null || echo all)" != "$kernels" ]; then
  begin
  say "building what has changed in the engine"
  with_progress install_engine --no-deps --editable .
  done_at engine
fi
