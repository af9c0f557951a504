# To be sourced: runs the tests of a GoogleTest program.

# gtest_has PROGRAM PATTERN...: fails if a pattern matches no test.
gtest_has() {
  local one status=0
  for one in "${@:2}"; do
    "$1" --gtest_list_tests "--gtest_filter=$one" | grep '^  ' >/dev/null || { echo "$1: no test is called $one" >&2; status=1; }
  done
  return $status
}

# gtest_shards PROGRAM PATTERNS EXCLUDED FOLDER: runs the tests that match, in one process per core, because one process per test
# would take as long as the tests. PATTERNS and EXCLUDED: separated by colons. FOLDER: for the files of tests.
gtest_shards() {
  local shards index one pids=() status=0
  mkdir -p "$4" || return
  shards=$(nproc)
  for ((index = 0; index < shards; index++)); do
    TEST_TMPDIR=$4 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$index timeout -k 10 1800 "$1" --gtest_brief=1 "--gtest_filter=$2-$3" &
    pids+=($!)
  done
  for one in "${pids[@]}"; do wait "$one" || status=1; done
  return $status
}

# gtest_join PATTERN...: one filter.
gtest_join() { local IFS=:; echo "$*"; }
