# To be sourced: runs the tests of a GoogleTest program.

# gtest_has PROGRAM EXCLUDED PATTERN...: fails if a pattern matches no test, or only tests that EXCLUDED matches.
gtest_has() {
  local one status=0
  for one in "${@:3}"; do
    "$1" --gtest_list_tests "--gtest_filter=$one-$2" | grep '^  ' >/dev/null ||
      { echo "$1: no test is called $one${2:+, without $2}" >&2; status=1; }
  done
  return $status
}

# gtest_shards PROGRAM PATTERNS EXCLUDED FOLDER: runs the tests that match, in one process per core, because one process per test
# would take as long as the tests. PATTERNS and EXCLUDED: separated by colons. FOLDER: for the files of tests. Prints the output
# of failed tests, and the test in which a process ended. SIGINT and SIGTERM end the processes too.
gtest_shards() {
  local shards index one pids=() logs=() signal='' status=0
  mkdir -p "$4" || return
  shards=$(nproc)
  trap 'signal=INT; gtest_end' INT
  trap 'signal=TERM; gtest_end' TERM
  for ((index = 0; index < shards; index++)); do
    logs+=("$4/shard-$index.log")
    TEST_TMPDIR=$4 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$index \
      timeout -k 10 1800 "$1" "--gtest_filter=$2-$3" >"${logs[index]}" 2>&1 &
    pids+=($!)
  done
  for one in "${pids[@]}"; do
    while kill -0 "$one" 2>/dev/null; do sleep 0.2; done  # bash can lose a signal that comes when it begins to `wait`
    wait "$one" || status=1
  done
  trap - INT TERM
  wait "${pids[@]}" 2>/dev/null  # a signal may end the loop's `wait` before the process has ended
  for one in "${logs[@]}"; do gtest_report "$one"; done
  [ -z "$signal" ] || kill -s "$signal" "$BASHPID"
  return $status
}

# Ends the background jobs. `timeout` leads a process group, and a signal that comes when it has just started a program does not
# reach the program through it.
gtest_end() {
  local job
  for job in $(jobs -p); do kill -- "$job" "-$job" 2>/dev/null; done
}

# gtest_report LOG: prints a log without the lines of passed tests, and the test that has not ended.
gtest_report() {
  grep -avE '^\[( RUN      |       OK |  SKIPPED |-{10})\]|^(Note: |$)' "$1"
  awk '/^\[ RUN/ { name = $4 } /^\[ +(OK|FAILED|SKIPPED) +\]/ { name = "" }
    END { if (name) print "the process ended while it ran " name }' "$1" >&2
}

# gtest_join PATTERN...: one filter.
gtest_join() { local IFS=:; echo "$*"; }
