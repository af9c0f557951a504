# To be sourced: the stages of a run of checks. Each runs even when one before it failed, and says how long it took. The
# last line of `end_of_stages` says what failed and what was left out.
stages_failed=()
stages_left_out=()
stages_table=

# stage NAME COMMAND...
stage() {
  local began=$SECONDS outcome=passed
  echo "== $1" >&2
  "${@:2}" </dev/null || {
    outcome=FAILED
    stages_failed+=("$1")
  }
  stages_table+=$(printf '%6d s  %-6s  %s' $((SECONDS - began)) "$outcome" "$1")$'\n'
  echo "== $1: $outcome, $((SECONDS - began)) s" >&2
}

# left_out NAME REASON: a stage that this machine cannot run. In continuous integration (CI=true) that is a failure, unless
# CHARONIA_LEAVE_OUT, names separated by commas, allows it.
left_out() {
  echo "== $1: left out: $2" >&2
  stages_left_out+=("$1")
  if [ "${CI:-}" = true ] && [[ ,${CHARONIA_LEAVE_OUT:-}, != *,"$1",* ]]; then
    stages_failed+=("$1 (left out)")
  fi
}

# Prints the table and the outcome. Succeeds when all passed.
end_of_stages() {
  local IFS=,
  printf '\n%s' "$stages_table" >&2
  printf '%6d s  in all\n' "$SECONDS" >&2
  local rest=${stages_left_out[*]:+; left out: ${stages_left_out[*]}}
  if [ ${#stages_failed[@]} -eq 0 ]; then
    echo "== all stages passed$rest" >&2
  else
    echo "== failed: ${stages_failed[*]}$rest" >&2
    return 1
  fi
}
