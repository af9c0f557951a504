#!/usr/bin/env bash
# keep_ptxas_output.sh COMPILER...: runs the compiler, and writes the output of ptxas -v for each kernel to a file next to the
# object (-o) instead of the terminal.
set -uo pipefail
object=
for ((i = 1; i < $#; ++i)); do
  if [ "${!i}" = -o ]; then
    next=$((i + 1))
    object=${!next}
  fi
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.stderr"
code=$?
# Lines that start with "ptxas info", and the indented lines after them. ptxas's warnings are written to both.
grep -E '^ptxas (info|warning)|^ +[0-9]+ bytes|^$' "$object.stderr" >"$object.ptxas" || true
grep -vE '^ptxas info|^ +[0-9]+ bytes|^$' "$object.stderr" >&2 || true
rm -f "$object.stderr"
[ "$code" = 0 ] || rm -f "$object.ptxas"
exit "$code"
