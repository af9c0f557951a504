#!/usr/bin/env bash
# Carries the service to machines that reach no registry: all images, what docker compose needs, and a workspace, in one folder.
#
#   scripts/save_images.sh save FOLDER [WORKSPACE]     here: after docker compose build and docker compose pull
#   FOLDER/save_images.sh load FOLDER                  there: checks every file and loads the images
#
# Then, in FOLDER: docker compose up --no-build --wait. WORKSPACE is a folder that charonia convert wrote; without one the demo
# model is served, which is in the server's image. The images are those of `docker compose config --images`, so COMPOSE_FILE and
# COMPOSE_PROFILES choose others, as for a GPU: COMPOSE_FILE=docker-compose.yml:docker-compose.gpu.yml
set -euo pipefail

fail() { echo "save_images.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$script"; exit "$1"; }
script=$(readlink -f "${BASH_SOURCE[0]}")

check_docker() {
  command -v docker >/dev/null || fail "docker is not installed (Debian and Ubuntu: docker.io)"
  docker info >/dev/null 2>&1 || fail "the Docker daemon does not answer: is it running, and may this user talk to it?"
}

check_workspace() {
  local manifest=$1/triton_models/weights/manifest.json
  [ -f "$manifest" ] || fail "$1 is no workspace: charonia convert MODEL --dst-path $1 makes one"
  ! grep -q '"/[^"]*\.safetensors"' "$manifest" ||
    fail "$1 points into files elsewhere: make one that holds its weights, with charonia convert and without --link"
}

save() {
  local folder=$1 workspace=${2:-} root images missing=()
  root=$(dirname "$script")/..
  [ ! -e "$folder" ] || [ -z "$(ls -A "$folder")" ] || fail "$folder is not empty"
  [ -z "$workspace" ] || check_workspace "$workspace"
  check_docker
  mapfile -t images < <(docker compose --project-directory "$root" config --images | sort -u)
  [ ${#images[@]} -gt 0 ] || fail "docker compose config --images names no image"
  for image in "${images[@]}"; do
    docker image inspect "$image" >/dev/null 2>&1 || missing+=("$image")
  done
  [ ${#missing[@]} -eq 0 ] ||
    fail "not on this machine: ${missing[*]}. First run: docker compose build && docker compose pull --ignore-buildable"

  mkdir -p "$folder"
  cp "$root"/docker-compose*.yml "$root/.env.example" "$script" "$folder/"
  cp -r "$root/monitoring" "$folder/"
  docker save --output "$folder/images.tar" "${images[@]}"
  if [ -n "$workspace" ]; then
    mkdir "$folder/models"
    cp -r "$workspace" "$folder/models/workspace"
    chmod -R a+rX "$folder/models" # the container's user is another one
    printf '%s\n' CHARONIA_MODELS=./models MODEL=/models/workspace >"$folder/.env"
  fi
  (cd "$folder" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
  echo "$folder has ${#images[@]} images$([ -z "$workspace" ] || echo ' and the workspace') ($(du -sh "$folder" | cut -f1))." \
    "Carry it over and run there: $folder/save_images.sh load $folder"
}

load() {
  cd "$1" 2>/dev/null || fail "there is no folder $1"
  [ -f SHA256SUMS ] || fail "$1 was not written by save_images.sh: it has no SHA256SUMS"
  sha256sum --check --quiet SHA256SUMS || fail "$1 is damaged: copy the files named above again"
  check_docker
  docker load --input images.tar
  echo "Ready. Start it with: cd $1 && docker compose up --no-build --wait"
}

case ${1:-} in
  save) [ $# -eq 2 ] || [ $# -eq 3 ] || usage 2 >&2; save "${@:2}" ;;
  load) [ $# -eq 2 ] || usage 2 >&2; load "$2" ;;
  -h | --help) usage 0 ;;
  *) usage 2 >&2 ;;
esac
