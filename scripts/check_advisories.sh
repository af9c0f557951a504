#!/usr/bin/env bash
# Looks the Python packages of the container images up in a database of security advisories.
#
#   scripts/check_advisories.sh [REQUIREMENTS...]     default: docker/requirements/*.txt
#   scripts/check_advisories.sh --probe               only whether the database answers
#
# The database is OSV's; CHARONIA_ADVISORIES_URL names another one of its kind. Fails where a package has a known advisory
# (it is printed, with the versions that mend it) and where the database does not answer.
set -uo pipefail
cd "$(dirname "$0")/.."
url=${CHARONIA_ADVISORIES_URL:-https://api.osv.dev/v1/query}

question='{"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "25.0"}'
if ! error=$(curl --fail --silent --show-error --max-time 20 --data "$question" --output /dev/null "$url" 2>&1); then
  echo "check_advisories.sh: $url does not answer: $error" >&2
  exit 1
fi
if [ "${1:-}" = --probe ]; then exit; fi

[ $# -gt 0 ] || set -- docker/requirements/*.txt
status=0
for file in "$@"; do
  echo "$file:"
  .venv/bin/pip-audit --requirement "$file" --disable-pip --no-deps --progress-spinner off --timeout 60 \
    --vulnerability-service osv --osv-url "$url" || status=1
done
exit $status
