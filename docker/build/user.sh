#!/bin/sh
# user.sh FOLDER...: user and group 1000, whatever the base image calls them, and folders that are theirs.
set -eu
getent group 1000 >/dev/null || groupadd --gid 1000 charonia
getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --home-dir /var/lib/charonia --no-create-home charonia
for folder in "$@"; do install --directory --owner 1000 --group 1000 "$folder"; done
