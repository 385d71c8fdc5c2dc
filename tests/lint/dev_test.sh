#!/bin/bash
# The parts of ./dev that decide something: what bench calls, and what is said of tests that did nothing.
# dev_test.sh WORK: a folder to write in.
set -euo pipefail
work=$1
mkdir -p "$work"
work=$(cd "$work" && pwd)
dev=$(cd "$(dirname "$0")/../.." && pwd)/dev
# shellcheck source=/dev/null
source "$dev"

n_failed=0
expect() {
  [ "$2" = "$3" ] && return 0
  printf '%s:\n--- is\n%s\n--- expected\n%s\n' "$1" "$2" "$3"
  n_failed=$((n_failed + 1))
}

need() { :; }
build() { :; }
model_or_tiny() { echo default.gguf; }
exec() { echo "$*"; } # what would be run

called() { expect "bench $1" "$(eval "bench $1")" "build/release/dunlin bench $2"; }
called "" "default.gguf"
called "--rounds 1" "default.gguf --rounds 1"
called "my.gguf --rounds 1" "my.gguf --rounds 1"
called "decode" "decode default.gguf"
called "decode --batch 1,16 --csv out.csv" "decode default.gguf --batch 1,16 --csv out.csv"
called "prefill my.gguf --chunk 512" "prefill my.gguf --chunk 512"
called "decode --synthetic c.json --layers 4" "decode --synthetic c.json --layers 4"
called "prefill --layers 4 --synthetic=c.json" "prefill --layers 4 --synthetic=c.json"
called "kernels" "kernels"
called "kernels --what matmul" "kernels --what matmul"
called "decode --help" "decode --help"

cat >"$work/log" <<'LOG'
Start testing: now
1/6 Testing: unit.base.test_buf
Output:
[====] Synthesis: Tested: 3 | Passing: 3 | Failing: 0 | Crashing: 0
Test Passed.
2/6 Testing: gpu.test_mla
Output:
SKIPPED: no GPU backend: no NVIDIA driver
SKIPPED: no GPU backend: no NVIDIA driver
[====] Synthesis: Tested: 0 | Passing: 0 | Failing: 0 | Crashing: 0
Test Passed.
3/6 Testing: unit.engine.test_gguf
Output:
SKIPPED: no file of a terabyte in /tmp
[====] Synthesis: Tested: 10 | Passing: 10 | Failing: 0 | Crashing: 0
Test Passed.
4/6 Testing: gpu.test_gqa
Output:
SKIPPED: no GPU backend: no NVIDIA driver
[====] Synthesis: Tested: 0 | Passing: 0 | Failing: 0 | Crashing: 0
Test Passed.
5/6 Testing: clients.model
Output:
SKIPPED: test_model.py: DN_MODEL is not set
Test Pass Reason:
Skip regular expression found in output. Regex=[^SKIPPED: ]
6/6 Testing: clients.kimi
Output:
SKIPPED: one of its parts
10 passed, 1 skipped in 2.1s
Test Passed.
End testing: now
LOG
expect "what was left out" "$(left_out "$work/log")" "6 tests, 3 of them had nothing to do here
  2: no GPU backend: no NVIDIA driver
  1: test_model.py: DN_MODEL is not set
left out of others:
  no file of a terabyte in /tmp
  one of its parts"
sed -n '1,5p' "$work/log" >"$work/short"
expect "nothing was left out" "$(left_out "$work/short")" "1 tests, none of which had nothing to do here"
expect "no log" "$(left_out "$work/none")" ""

# The help is the comment at the top, all of it and nothing more.
expect "help" "$("$dev" help | sed -n '1p;$p')" \
  "Everything a developer or an operator from source does, in one file. Works on a bare Debian 12 (or 13) with git and root.
Models are kept in \${XDG_CACHE_HOME:-~/.cache}/dunlin. Answers go to stdout, progress to stderr."
[ $n_failed = 0 ]
