#!/bin/sh
# Ends with 1 where more communication is exposed, or the step is longer, than on the main branch; 2 for bad input.
#
#   counterpoint analyze main/*.json.gz -o main.json     # on the main branch, once for each merge
#   examples/ci_gate/gate.sh main.json new/*.json.gz     # on a pull request
set -eu
test $# -ge 2 || { echo "usage: gate.sh BASELINE.json TRACE..." >&2; exit 2; }

baseline=$1
shift
exec counterpoint analyze "$@" --no-recover --baseline "$baseline" --markdown summary.md \
    --fail-if 'exposed > 5%' --fail-if 'step > baseline + 3%'
