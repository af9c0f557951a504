#!/usr/bin/env bash
# Writes a software bill of materials of the container images' own layers: build/sbom/{server,gateway}.cdx.json (CycloneDX).
#
#   scripts/sbom.sh
#
# They list the packages of docker/requirements/ with versions and checksums, and with them what is compiled into the
# engine. What the distribution installs is not in them: scan a built image for that.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/sbom
if [[ ! -x .venv/bin/cyclonedx-py ]]; then
  echo "scripts/sbom.sh needs the test environment: scripts/setup.sh test" >&2
  exit 1
fi
mkdir -p "$folder"

# write NAME PYPROJECT: requirements from standard input
write() {
  PYTHONWARNINGS=ignore .venv/bin/cyclonedx-py requirements --pyproject "$2" --output-reproducible --no-validate \
    --output-format JSON --output-file "$folder/$1.cdx.json" -
  echo "$folder/$1.cdx.json"
}

# Of what the engine's build needs, no more than these headers and xgrammar's sources is in the image.
compiled_in() {
  awk '/^[a-z]/ { wanted = /^(nlohmann-json|pybind11)==/ } wanted' docker/requirements/build.txt
  grep '^xgrammar==' engine/third_party/xgrammar.txt
}

{ cat docker/requirements/server.txt docker/requirements/triton.txt; compiled_in; } | write server pyproject.toml
write gateway gateway/pyproject.toml <docker/requirements/gateway.txt
