#!/usr/bin/env bash
# Prints the path of a kubectl with kustomize 5: the one on PATH, otherwise Debian 13's, which is unpacked under build/ but not
# installed. (Debian 12's has kustomize 2, which does not support components.)
set -euo pipefail
cd "$(dirname "$0")/.."

is_new() { "$1" version --client 2>/dev/null | grep -Eq '^Kustomize Version: v([5-9]|[1-9][0-9])\.'; }
fail() {
  echo "kubectl 1.27 or newer is needed for deploy/, and $*: install it and put it on PATH" >&2
  exit 1
}

if found=$(command -v kubectl) && is_new "$found"; then
  echo "$found"
  exit
fi
prefix=$PWD/build/kubectl
kubectl=$prefix/usr/bin/kubectl
if ! { [ -x "$kubectl" ] && is_new "$kubectl"; }; then
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "apt is missing, so it cannot be downloaded"
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -f "$keyring" ] || fail "Debian's keyring is missing, so it cannot be verified"
  # The lock lets one of several processes download it.
  mkdir -p "$prefix"
  exec 8>"$prefix/lock"
  flock 8
  if [ -x "$kubectl" ] && is_new "$kubectl"; then
    echo "$kubectl"
    exit
  fi
  # Use the mirror that this machine is configured for.
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' 'Created-By: Packages' | sed -n 1p)
  mkdir -p "$prefix/lists/partial" "$prefix/cache/archives/partial"
  echo "deb [signed-by=$keyring] ${mirror:-http://deb.debian.org/debian} trixie main" >"$prefix/sources.list"
  # With its own lists, apt needs no privileges and changes nothing on this machine.
  apt() {
    apt-get --quiet --option Dir::Etc::SourceList="$prefix/sources.list" --option Dir::Etc::SourceParts=- \
      --option Dir::State::Lists="$prefix/lists" --option Dir::State::Status=/dev/null \
      --option Dir::Cache="$prefix/cache" --option Acquire::Languages=none --option APT::Sandbox::User="$(id -un)" "$@" >&2
  }
  # Debian's package kubernetes-client is built from the same source as kubectl.
  { apt update && cd "$prefix" && apt download kubectl && dpkg -x kubectl_*.deb "$prefix"; } ||
    fail "it cannot be downloaded from Debian"
  rm -rf "$prefix/lists" "$prefix/cache" "$prefix"/kubectl_*.deb
  is_new "$kubectl" || fail "the one of Debian 13 does not run here"
fi
echo "$kubectl"
