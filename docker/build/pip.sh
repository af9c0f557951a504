#!/bin/sh
# pip.sh VENV ARGUMENT...: runs the distribution's pip for a virtual environment without pip. Build secrets, all optional:
#   ca_bundle   certificates to trust, PEM
#   pip_conf    a pip.conf, for example for a private index
set -eu
venv=$1
shift
if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi
if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
pip=$(echo /usr/share/python-wheels/pip-*.whl)/pip
exec "$venv/bin/python" "$pip" "$@"
