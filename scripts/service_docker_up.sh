#!/usr/bin/env bash
# Serves a workspace with Triton in a container: like the script of the same name in a workspace, but with the default
# ./workspace.
#
#   scripts/service_docker_up.sh [--workspace DIR] [OPTION...]      see --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../charonia/service_docker_up.sh" --workspace workspace "$@"
