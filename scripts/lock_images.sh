#!/usr/bin/env bash
# Writes docker/requirements/*.txt: the exact versions, with checksums, of the Python packages in the container images, of those
# that scripts/setup.sh installs for `make serve` (host.txt), and of those with the headers that CUDA needs (cuda.txt).
#
#   scripts/lock_images.sh [OPTION FOR uv pip compile ...]      for example --upgrade or --upgrade-package NAME
#
# Needs uv (pip install uv). Without an option, versions that still satisfy the pyproject.toml files do not change.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "lock_images.sh: uv is not installed: pip install uv" >&2; exit 1; }
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
for package in client gateway; do uv build --quiet --wheel --out-dir "$own" "$package"; done

# lock NAME SOURCE...: for every version of Python that Charonia runs on
lock() {
  uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-emit-index-url \
    --no-emit-find-links --find-links "$own" --custom-compile-command scripts/lock_images.sh \
    --no-emit-package charonia-client --no-emit-package charonia-gateway \
    --output-file "docker/requirements/$1.txt" "${@:2}" "${options[@]}" >/dev/null
}

options=("$@")
mkdir -p docker/requirements
lock gateway gateway/pyproject.toml client/pyproject.toml
lock server pyproject.toml docker/requirements/server.in
lock triton docker/requirements/triton.in --no-deps
lock build scripts/requirements-build.txt
lock node docker/requirements/node.in
lock uv docker/requirements/uv.in
lock cuda docker/requirements/cuda.in --no-deps
python3 scripts/dependencies.py serve | lock host -
