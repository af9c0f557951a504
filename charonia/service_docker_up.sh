#!/usr/bin/env bash
# Serves this workspace with Triton in a container.
#
#   ./service_docker_up.sh [OPTION FOR docker run ...]
#
# Environment (all optional):
#   CHARONIA_IMAGE         an image with Triton 24.10 or newer      (nvcr.io/nvidia/tritonserver:24.10-py3)
#   CHARONIA_BACKEND_DIR   the folder that holds libtriton_charonia.so (asked of the installed charonia package)
#   CHARONIA_HTTP_PORT, CHARONIA_GRPC_PORT, CHARONIA_METRICS_PORT      (33336, 33337, 33338)
#   CHARONIA_<KEY>         every inference parameter of triton_models/weights/config.ini
set -euo pipefail

fail() { echo "service_docker_up.sh: $*" >&2; exit 1; }

workspace=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
image=${CHARONIA_IMAGE:-nvcr.io/nvidia/tritonserver:24.10-py3}
http_port=${CHARONIA_HTTP_PORT:-33336}
grpc_port=${CHARONIA_GRPC_PORT:-33337}
metrics_port=${CHARONIA_METRICS_PORT:-33338}

command -v docker >/dev/null || fail "docker is not installed; without it, run: charonia serve $workspace"
docker info >/dev/null 2>&1 || fail "the docker daemon does not answer: is it running, and may this user talk to it?"

backend_dir=${CHARONIA_BACKEND_DIR:-}
if [ -z "$backend_dir" ]; then
  backend_dir=$(python3 -c 'from charonia.serve.triton import backend_library; print(backend_library().parent)') ||
    fail "the charonia package is not installed here; set CHARONIA_BACKEND_DIR to the folder of libtriton_charonia.so"
fi
[ -f "$backend_dir/libtriton_charonia.so" ] || fail "$backend_dir has no libtriton_charonia.so; set CHARONIA_BACKEND_DIR"

options=()
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then options+=(--gpus all); fi
[ -t 0 ] && [ -t 1 ] && options+=(--interactive --tty)

# A linked workspace names its weight files by absolute paths: they are mounted where they are.
while IFS= read -r folder; do options+=(--volume "$folder:$folder:ro"); done < <(
  python3 - "$workspace/triton_models/weights/manifest.json" <<'PYTHON'
import json, pathlib, sys
files = json.loads(pathlib.Path(sys.argv[1]).read_text())["files"]
print(*sorted({str(pathlib.Path(name).parent) for name in files if name.startswith("/")}), sep="\n", end="")
PYTHON
)

# Every setting of ours goes through; the ports above are this machine's, not the container's.
while IFS='=' read -r name _; do
  case $name in
    CHARONIA_IMAGE | CHARONIA_BACKEND_DIR | CHARONIA_*_PORT) ;;
    CHARONIA_*) options+=(--env "$name") ;;
  esac
done < <(env)

# --shm-size: Triton passes tensors to its Python models through shared memory.
exec docker run --rm --name "${CHARONIA_CONTAINER:-charonia-triton}" --init \
  --shm-size 1g --ulimit memlock=-1 --ulimit stack=67108864 \
  --publish "$http_port:33336" --publish "$grpc_port:33337" --publish "$metrics_port:33338" \
  --volume "$workspace:/workspace/charonia:ro" \
  --volume "$backend_dir:/opt/tritonserver/backends/charonia:ro" \
  "${options[@]}" "$@" "$image" bash -c '
    set -e
    python3 -c "import transformers, jinja2" 2>/dev/null ||
      pip install --quiet --no-cache-dir "numpy<2" "transformers>=4.46" jinja2
    exec tritonserver --model-repository /workspace/charonia/model_repository \
      --http-port 33336 --grpc-port 33337 --metrics-port 33338'
