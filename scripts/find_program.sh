# find_program NAME... -- PACKAGE...: prints the first of these programs that is installed; else installs Debian's packages, as
# root in continuous integration (CI=true), and looks again. Exit code 1: none can be had. To be sourced, in the checkout.
find_installed() {
  local name
  for name in "$@"; do
    if command -v "$name"; then return; fi
  done
  return 1
}

find_program() {
  local names=()
  while [ "$1" != -- ]; do names+=("$1") && shift; done
  shift
  if find_installed "${names[@]}"; then return; fi
  if [ "${CI:-}" != true ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return 1; fi
  mkdir -p build
  # Two that need it at once install it one after the other. 8>&-: what is started by an installation may stay, and must
  # not hold the lock.
  exec 8>"build/${names[0]}.lock"
  flock 8
  if find_installed "${names[@]}"; then return; fi
  install_packages "build/${names[0]}.log" "$@" 8>&- || true
  find_installed "${names[@]}"
}

# install_packages LOG PACKAGE...: the second time with new lists of what there is.
install_packages() {
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends "${@:2}")
  "${install[@]}" >"$1" 2>&1 || { apt-get -q update >/dev/null 2>&1 && "${install[@]}" >"$1" 2>&1; }
}
