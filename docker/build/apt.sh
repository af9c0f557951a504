#!/bin/sh
# apt.sh PACKAGE...: installs Debian packages and leaves no lists behind. Build secrets, all optional:
#   ca_bundle     certificates to trust, PEM
#   apt_sources   a sources.list to use in place of the image's
set -eu
set -- install --yes --quiet --no-install-recommends "$@"
secret() { [ -s "/run/secrets/$1" ]; }
apt() {
  if secret ca_bundle; then set -- -o Acquire::https::CAInfo=/run/secrets/ca_bundle "$@"; fi
  if secret apt_sources; then set -- -o Dir::Etc::SourceList=/run/secrets/apt_sources -o Dir::Etc::SourceParts=- "$@"; fi
  # The secrets are root's; apt's own user for downloads could not read them.
  DEBIAN_FRONTEND=noninteractive apt-get -o APT::Sandbox::User=root -o Acquire::Languages=none "$@"
}
apt update --quiet
apt "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/log/apt /var/log/dpkg.log
