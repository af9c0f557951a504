#!/usr/bin/env bash
# Serves a workspace with Triton in a container: HTTP 33336, gRPC 33337, metrics 33338.
#
#   ./service_docker_up.sh [OPTION...] [-- OPTION FOR docker run ...]
#
#   --gpus WHICH       all, none, a number of GPUs, or device=0,1     (all if this machine has GPUs, otherwise none)
#   --tp N             number of tensor-parallel ranks of the workspace                 (as converted)
#   --shm-size SIZE    shared memory between Triton and its text models                 (1g)
#   --workspace DIR    the workspace                                                    (folder of this script)
#   --image IMAGE      CHARONIA_IMAGE                                                   (charonia-server)
#   --name NAME        the container's name, CHARONIA_CONTAINER                         (charonia-triton)
#   --detach           return as soon as the container has started
#   --help
#
# Environment: CHARONIA_HTTP_PORT, CHARONIA_GRPC_PORT and CHARONIA_METRICS_PORT are ports of this machine, at its address
# CHARONIA_TRITON_ADDRESS (default 127.0.0.1: the ports need no key, so other machines must not reach them). All other
# CHARONIA_<KEY> variables, the inference parameters of triton_models/weights/config.ini, are passed to the container.
# docker stop waits for twice CHARONIA_DRAIN_TIMEOUT_S plus 30 s.
set -euo pipefail

fail() { echo "service_docker_up.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

workspace=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
image=${CHARONIA_IMAGE:-charonia-server}
name=${CHARONIA_CONTAINER:-charonia-triton}
shm_size=1g
gpus=
tp=
options=()
[ -t 0 ] && [ -t 1 ] && options+=(--interactive --tty)

names=gpus:,tp:,shm-size:,workspace:,image:,name:,detach,help
arguments=$(getopt --name service_docker_up.sh --options h --longoptions "$names" -- "$@") ||
  fail "see ./service_docker_up.sh --help; options for docker run come after --"
eval set -- "$arguments"
while [ "$1" != -- ]; do
  case $1 in
    --gpus) gpus=$2; shift ;;
    --tp) tp=$2; shift ;;
    --shm-size) shm_size=$2; shift ;;
    --workspace) workspace=$2; shift ;;
    --image) image=$2; shift ;;
    --name) name=$2; shift ;;
    --detach) options+=(--detach) ;;
    --help | -h) usage; exit ;;
  esac
  shift
done
shift

[ -f "$workspace/triton_models/weights/manifest.json" ] ||
  fail "$workspace is not a workspace: create one with charonia convert MODEL --dst-path $workspace"
workspace=$(cd "$workspace" && pwd)

command -v docker >/dev/null ||
  fail "docker is not installed (Debian and Ubuntu: docker.io); without it, run: charonia serve $workspace"
docker info >/dev/null 2>&1 ||
  fail "the Docker daemon does not respond: is it running (systemctl status docker), and may this user access it (group docker)?"
docker image inspect "$image" >/dev/null 2>&1 ||
  fail "the image $image is not on this machine: build it in a checkout (docker compose build server), load it" \
    "(docker load), or pull one (docker pull) and name it with --image"

if [ -z "$gpus" ]; then
  gpus=none
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then gpus=all; fi
fi
if [ "$gpus" != none ]; then
  docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' | grep -qw nvidia ||
    fail "--gpus $gpus needs the NVIDIA runtime, which Docker does not have: install the package nvidia-container-toolkit, then run" \
      "'nvidia-ctk runtime configure --runtime=docker' and restart Docker; or serve on the CPU with --gpus none"
  options+=(--gpus "$gpus" --ulimit memlock=-1) # the GPU reads locked memory
fi
if [ -n "$tp" ]; then options+=(--env "CHARONIA_TENSOR_PARA_SIZE=$tp"); fi

# A linked workspace refers to its weight files by absolute paths, so they are mounted at the same paths.
while IFS= read -r folder; do
  options+=(--volume "$folder:$folder:ro")
done < <(grep -o '"/[^"]*\.safetensors"' "$workspace/triton_models/weights/manifest.json" | tr -d '"' |
  xargs --no-run-if-empty --delimiter '\n' dirname | sort -u)

# All settings are passed on, except addresses, ports and folders, which belong to this machine.
address=${CHARONIA_TRITON_ADDRESS:-127.0.0.1}
case $address in
  localhost) address=127.0.0.1 ;; # Docker accepts addresses only
  *:*) address="[$address]" ;;
esac
while IFS= read -r variable; do
  case $variable in
    CHARONIA_IMAGE | CHARONIA_CONTAINER | CHARONIA_HOST | CHARONIA_TRITON_ADDRESS | CHARONIA_*_PORT) ;;
    CHARONIA_MAX_RESTARTS | CHARONIA_LOGS | CHARONIA_*_DIR) ;;
    *) options+=(--env "$variable") ;;
  esac
done < <(compgen -e CHARONIA_)

# Nothing supervises this container, so charonia serve restarts Triton; the default of the image is not to restart it.
options+=(--env "CHARONIA_MAX_RESTARTS=${CHARONIA_MAX_RESTARTS:-5}")

# AFTER_DRAINS_S of charonia/serve/launcher.py, after two drain times.
drain=${CHARONIA_DRAIN_TIMEOUT_S:-$(sed -n 's/^drain_timeout_s *= *//p' "$workspace/triton_models/weights/config.ini" 2>/dev/null || true)}
LC_ALL=C printf -v drain_ms %.0f "${drain:-30}e3" 2>/dev/null || fail "drain_timeout_s = $drain is not a number of seconds"
stop_timeout=$(((2 * drain_ms + 999) / 1000 + 30))

exec docker run --rm --name "$name" --stop-timeout "$stop_timeout" --read-only --tmpfs /tmp --cap-drop ALL \
  --security-opt no-new-privileges --shm-size "$shm_size" \
  --publish "$address:${CHARONIA_HTTP_PORT:-33336}:33336" \
  --publish "$address:${CHARONIA_GRPC_PORT:-33337}:33337" \
  --publish "$address:${CHARONIA_METRICS_PORT:-33338}:33338" \
  --volume "$workspace:/workspace:ro" --env MODEL=/workspace \
  ${options[@]+"${options[@]}"} "$@" "$image"
