#!/usr/bin/env bash
# setup.sh serve|test: brings .venv up to date with this checkout. It does nothing that has been done, so it may run
# before every command.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:?serve or test}
stamps=.venv/stamps
mkdir -p build
exec 9>build/setup.lock
flock 9

say() { echo "setup: $*" >&2; }

# outdated STAMP PATH...: true when the stamp is not there or older than a file under the paths
outdated() {
  [ ! -e "$stamps/$1" ] || [ -n "$(find "${@:2}" -type f -newer "$stamps/$1" -print -quit)" ]
}

# done_at STAMP: it is as of the time when the step began, so that what changed meanwhile is seen next time
begin() { touch build/step-began; }
done_at() { mkdir -p "$stamps" && touch -r build/step-began "$stamps/$1"; }

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input --quiet "$@"; }

# --no-build-isolation: the build folder under build/ stays valid, so a change compiles what it touches and no more.
install_engine() {
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} PATH="$PWD/.venv/bin:$PATH" \
    pip install --no-build-isolation "$@"
}

if ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(scripts/find_python.sh)
  "$python" scripts/check_machine.py
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
elif [ ! -e "$stamps/packages" ]; then
  .venv/bin/python scripts/check_machine.py
fi

if outdated packages pyproject.toml client/pyproject.toml gateway/pyproject.toml scripts/requirements-build.txt; then
  begin
  say "installing packages and building the engine (the first time takes some minutes)"
  pip install --requirement scripts/requirements-build.txt
  install_engine --editable '.[serve]' --editable client --editable gateway
  done_at packages
  done_at engine
fi

if outdated engine engine CMakeLists.txt; then
  begin
  say "building what has changed in the engine"
  install_engine --no-deps --editable .
  done_at engine
fi

if [ "$purpose" = test ] && outdated test pyproject.toml scripts/requirements-test.txt; then
  begin
  say "installing what only the tests need"
  install_engine --requirement scripts/requirements-test.txt --editable '.[test]' --editable client --editable gateway
  done_at test
fi
