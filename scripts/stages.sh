# To be sourced: the stages of a run of checks. A stage runs even if an earlier one failed, and prints how long it took. The
# last line of `end_of_stages` lists failed and skipped stages.
#
# CHARONIA_FAILURES   a file; each failed stage appends the lines that show the reason. Unset: the reason is only in the
#                     output of the stage
stages_failed=()
stages_left_out=()
stages_beside=()
stages_table=

# stage NAME COMMAND...
stage() {
  local began=$SECONDS status=0
  echo "== $1" >&2
  if [ -n "${CHARONIA_FAILURES:-}" ]; then
    stage_explained "$@"
  else
    "${@:2}" </dev/null
  fi || status=$?
  stage_ended "$1" "$status" $((SECONDS - began))
}

# stage_ended NAME STATUS SECONDS
stage_ended() {
  local outcome=passed
  if [ "$2" -ne 0 ]; then
    outcome=FAILED
    stages_failed+=("$1")
  fi
  stages_table+=$(printf '%6d s  %-6s  %s' "$3" "$outcome" "$1")$'\n'
  echo "== $1: $outcome, $3 s" >&2
}

# stage_beside NAME COMMAND...: runs in parallel with the next stages, for commands that do not use all cores. `join_stages`
# prints its output.
stage_beside() {
  local log
  log=$(mktemp) || return
  echo "== $1, in parallel with the next stages" >&2
  set -m  # its own process group, which this script kills when it exits
  (
    began=$SECONDS status=0
    "${@:2}" </dev/null >"$log" 2>&1 || status=$?
    echo "$status $((SECONDS - began))" >"$log.ended"
  ) &
  set +m
  stages_beside+=("$! $log $1")
  trap 'stop_beside' EXIT
}

stop_beside() {
  local one pid log name
  for one in "${stages_beside[@]}"; do
    read -r pid log name <<<"$one"
    kill -- -"$pid" 2>/dev/null
    rm -f "$log" "$log.ended"
  done
}

# join_stages: waits for the commands of stage_beside, and counts them as stages.
join_stages() {
  local one pid log name status seconds
  for one in "${stages_beside[@]}"; do
    read -r pid log name <<<"$one"
    wait "$pid"
    read -r status seconds <"$log.ended" || status=1 seconds=0
    echo "== $name" >&2
    cat "$log" >&2
    if [ "$status" -ne 0 ] && [ -n "${CHARONIA_FAILURES:-}" ]; then explain "$name" "$status" "$log"; fi
    rm -f "$log" "$log.ended"
    stage_ended "$name" "$status" "$seconds"
  done
  stages_beside=()
}

# stage_explained NAME COMMAND...: runs the command in this shell. If it fails, appends the reason to CHARONIA_FAILURES, unless
# an inner stage has done so.
stage_explained() {
  local log status=0 known reader output _
  log=$(mktemp) || return
  known=$(wc -c <"$CHARONIA_FAILURES")
  exec {output}> >(exec tee "$log")
  reader=$!
  "${@:2}" </dev/null >&"$output" 2>&1 {output}>&- || status=$?
  exec {output}>&-
  for _ in {1..50}; do  # limited: a background process of the command may keep the pipe open
    kill -0 "$reader" 2>/dev/null || break
    sleep 0.1
  done
  if [ "$status" -ne 0 ] && [ "$(wc -c <"$CHARONIA_FAILURES")" -eq "$known" ]; then
    explain "$1" "$status" "$log"
  fi
  rm -f "$log"
  return "$status"
}

# explain NAME STATUS LOG: appends the lines of the log that show the reason to CHARONIA_FAILURES.
explain() {
  {
    echo "== $1, exit code $2:"
    grep -aE '^(E  |FAILED |ERROR )|[Ee]rror:|\*\*\*' "$3" | cut -c1-240 | tail -n 40
    echo "-- and its last lines:"
    tail -n 12 "$3" | cut -c1-240
  } >>"$CHARONIA_FAILURES"
}

# left_out NAME REASON: reports a stage that this machine cannot run. In continuous integration (CI=true) this is a failure,
# unless CHARONIA_LEAVE_OUT (names separated by commas) contains the stage.
left_out() {
  echo "== $1: left out: $2" >&2
  stages_left_out+=("$1")
  if [ "${CI:-}" = true ] && [[ ,${CHARONIA_LEAVE_OUT:-}, != *,"$1",* ]]; then
    stages_failed+=("$1 (left out)")
  fi
}

# Prints the table and the outcome. Succeeds if all stages passed.
end_of_stages() {
  local IFS=,
  printf '\n%s' "$stages_table" >&2
  printf '%6d s  in total\n' "$SECONDS" >&2
  local rest=${stages_left_out[*]:+; left out: ${stages_left_out[*]}}
  if [ ${#stages_failed[@]} -eq 0 ]; then
    echo "== all stages passed$rest" >&2
  else
    echo "== failed: ${stages_failed[*]}$rest" >&2
    return 1
  fi
}
