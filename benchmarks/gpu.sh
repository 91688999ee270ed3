#!/usr/bin/env bash
# Everything that needs a card, in under half an hour: the tests marked gpu, then the suites' rows, as raw results in
# the folder $1 (default benchmarks/results). A step that fails does not keep the next ones from being measured.
cd "$(dirname "$0")/.." || exit 1
out=${1:-benchmarks/results}
failed=0
step() { echo "== $*"; "$@" || failed=1; }
# shellcheck disable=SC2046
step python3 -m pytest -q -m gpu $(grep -rl 'mark\.gpu' tests --include='test_*.py')
step python3 -m benchmarks attention --only G1,G2,G5,G6 --out "$out"
step python3 -m benchmarks train --only G4,STEP,EQUILIBRIUM --out "$out"
step python3 -m benchmarks attention --only LENGTH,STEPS,C4 --out "$out"
step python3 -m benchmarks train --only LENGTH,BLOCK,MEMORY,COMPILED,LLAMA --out "$out"
step python3 -m benchmarks kernels --tune --out "$out"
exit $failed
