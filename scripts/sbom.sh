#!/usr/bin/env bash
# Writes a software bill of materials of the container images' own layers: build/sbom/{server,gateway}.cdx.json (CycloneDX).
#
#   scripts/sbom.sh
#
# They list the packages of docker/requirements/ with versions and checksums, and with them what is compiled into the
# engine, and the libraries of the chat page. What the distribution installs is not in them: scan a built image for that.
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

# The libraries of the chat page, as npm's lock file pins them, and what is compiled into markdown-it's one file.
.venv/bin/python - "$folder/gateway.cdx.json" <<'END'
import base64
import json
import sys
from pathlib import Path
from urllib.parse import quote

sys.path.append("scripts")
from get_page_libraries import WANTED

pinned = json.loads(Path("gateway/package-lock.json").read_text())["packages"]
parser = pinned["node_modules/markdown-it"]["dependencies"]
bill = json.loads(Path(sys.argv[1]).read_text())
for name in sorted({*WANTED, *parser} - {"argparse"}):  # argparse is of its program for terminals
    package = pinned[f"node_modules/{name}"]
    kind, digest = package["integrity"].split("-", 1)
    address = f"pkg:npm/{quote(name, safe='/')}@{package['version']}"
    bill["components"].append(
        {
            "type": "library",
            "bom-ref": address,
            "name": name,
            "version": package["version"],
            "purl": address,
            "hashes": [{"alg": f"SHA-{kind.removeprefix('sha')}", "content": base64.b64decode(digest).hex()}],
        }
    )
Path(sys.argv[1]).write_text(json.dumps(bill, indent=2) + "\n")
END
