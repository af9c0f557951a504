#!/bin/sh
# apt.sh PACKAGE...: installs Debian packages, and removes apt's lists afterwards. Build secrets, all optional:
#   ca_bundle     certificates to trust, PEM
#   apt_sources   a sources.list that replaces the image's
set -eu
set -- install --yes --quiet --no-install-recommends "$@"
secret() { [ -s "/run/secrets/$1" ]; }
apt() {
  if secret ca_bundle; then set -- -o Acquire::https::CAInfo=/run/secrets/ca_bundle "$@"; fi
  if secret apt_sources; then set -- -o Dir::Etc::SourceList=/run/secrets/apt_sources -o Dir::Etc::SourceParts=- "$@"; fi
  # Root owns the secrets, so apt's download user could not read them.
  DEBIAN_FRONTEND=noninteractive apt-get -o APT::Sandbox::User=root -o Acquire::Languages=none "$@"
}
apt update --quiet
apt "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/log/apt /var/log/dpkg.log
