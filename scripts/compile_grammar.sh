#!/usr/bin/env bash
# compile_grammar.sh LIBRARY: compiles the library of structured output in the engine's build folder, and puts it at that path.
# For scripts/setup.sh, which holds a lock on LIBRARY.build for it; the lock ends with this script and its compilers. Interrupted,
# it is begun anew, with what was compiled, when setup.sh runs the next time.
set -euo pipefail
library=$(realpath -m "${1:?where the library shall be}")
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
# The server goes first. With less than this, a server that is always busy would keep it from ever being compiled. Where each
# session of processes has a share of the processor, it is the session that counts.
renice -n 10 $$ >/dev/null 2>&1 || true  # where it goes after more than that already
echo 10 2>/dev/null >/proc/self/autogroup || true

log=build/compile_grammar.log
echo "$log" >"$library.build"
# With many processors two compilers disturb nobody.
cmake --build build/engine --target charonia_grammar --parallel $(($(nproc) < 4 ? 1 : 2)) >"$log" 2>&1
# Never half of it, whenever this ends.
cp build/engine/libcharonia_grammar.so "$library.new" 2>>"$log"
mv "$library.new" "$library" 2>>"$log"
rm "$library.build"
