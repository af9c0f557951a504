#!/usr/bin/env bash
# Serves a workspace with Triton in a container; as the script of the same name in a workspace, with ./workspace as its default.
#
#   scripts/service_docker_up.sh [--workspace DIR] [OPTION...]      --help says more
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../charonia/service_docker_up.sh" --workspace workspace "$@"
