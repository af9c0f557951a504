# To be sourced in the checkout: finds programs and libraries in Debian's packages.

find_installed() {
  local name
  for name in "$@"; do
    if command -v "$name"; then return; fi
  done
  return 1
}

# find_program NAME... -- PACKAGE...: prints the first of these programs that is installed. As root in continuous integration
# (CI=true) it installs the packages and searches again. Exit code 1 if there is none.
find_program() {
  local names=()
  while [ "$1" != -- ]; do names+=("$1") && shift; done
  shift
  if find_installed "${names[@]}"; then return; fi
  if [ "${CI:-}" != true ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return 1; fi
  mkdir -p build
  # 8>&-: a service started by the installation must not keep the lock.
  exec 8>"build/${names[0]}.lock"
  flock 8
  if find_installed "${names[@]}"; then return; fi
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends "$@")
  with_new_lists "${install[@]}" >"build/${names[0]}.log" 2>&1 8>&- || true
  find_installed "${names[@]}"
}

# unpack_packages FOLDER PACKAGE...: downloads Debian's packages and unpacks them into the folder, without installing them.
unpack_packages() (
  if [ -f "$1/unpacked" ]; then exit; fi
  mkdir -p "$1/packages" && cd "$1/packages" || exit
  exec 8>"$1/lock"
  flock 8
  if [ -f "$1/unpacked" ]; then exit; fi
  with_new_lists apt-get -q download "${@:2}" >"$1/log" 2>&1 || exit
  for package in *.deb; do dpkg -x "$package" "$1" || exit; done
  touch "$1/unpacked"
)

# with_new_lists COMMAND...: runs the command; if it fails, root updates apt's lists and runs it again.
with_new_lists() { "$@" || { if [ "$(id -u)" = 0 ]; then apt-get -q update; fi && "$@"; }; }
