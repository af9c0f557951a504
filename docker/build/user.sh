#!/bin/sh
# user.sh FOLDER...: creates user and group 1000 if they do not exist, and folders that belong to them.
set -eu
getent group 1000 >/dev/null || groupadd --gid 1000 charonia
getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --home-dir /var/lib/charonia --no-create-home charonia
for folder in "$@"; do install --directory --owner 1000 --group 1000 "$folder"; done
