#!/usr/bin/env bash
# All that is asked of a card, in one call of at most seven minutes: rows in $1/rows.jsonl, the tables last on the screen.
# `--dry` as $2 runs all parts at the smallest sizes on a CPU. CONTRIBUTING.md says what to copy to a bare machine.
cd "$(dirname "$0")/.." || exit 1
out=${1:?"the folder for rows.jsonl"}
BEGAN=$(date +%s)
export BEGAN
ls implicit_attention/ops/native/*.library > /dev/null 2>&1 || export IMPLICIT_ATTENTION_NATIVE=off
code=75
# 75: a kernel broke the context of the device, and what is left needs a process of its own.
while [ "$code" = 75 ]; do
  left=$((410 - $(date +%s) + BEGAN))
  [ "$left" -gt 0 ] || break
  timeout --kill-after=3 "$left" python3 -m benchmarks.card "$@"
  code=$?
done
case $code in 0 | 2 | 3) ;; *) python3 -m benchmarks.card "$out" --show ;; esac
exit "$code"
