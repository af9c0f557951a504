#!/bin/sh
# Downloads the libraries of the gateway's pages. Build secrets, all optional: the secrets of pip.sh, and
#   npmrc   an .npmrc, for example for a private registry
set -eu
if [ -s /run/secrets/ca_bundle ]; then export NODE_EXTRA_CA_CERTS=/run/secrets/ca_bundle; fi
if [ -s /run/secrets/npmrc ]; then export npm_config_userconfig=/run/secrets/npmrc; fi
exec /venv/bin/python /source/scripts/get_page_libraries.py --pip /build/pip.sh /venv
