#!/bin/bash
# What tests/gpu/run.sh says of tests that pass, fail and run out of time: programs that only claim to be some, and a
# sanitizer. gpu_run_test.sh WORK: a folder to write in.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$1"
mkdir -p "$1"/{bin/tests,path}
cd "$1"
cp "$source/tests/gpu/run.sh" .
script() { printf '#!/bin/bash\n%s\n' "$2" >"$1" && chmod +x "$1"; }
script path/nvidia-smi 'echo "GPU of paper, 0, 0 MiB"'
script path/nproc 'echo 16'
script path/compute-sanitizer 'while [ "${1#bin/}" = "$1" ]; do shift; done; SANITIZED=1 exec "$@"'
ends='echo "[====] Synthesis: Tested: 1 | Passing: 1 | Failing: 0 | Crashing: 0"'
script bin/tests/gpu_test_good "echo \"\$@\" >>calls; $ends"
script bin/tests/gpu_test_slow "[ -z \"\${SANITIZED:-}\" ] || { echo hangs; exec sleep 60; }; $ends"
script bin/tests/gpu_test_start "$ends"
export PATH=$PWD/path:$PATH DN_LOGS=$PWD/logs

# expect STATUS LAST_LINE PARTS...
expect() {
  local status=$1 line=$2 is=0 last
  shift 2
  bash run.sh "$@" >out 2>&1 || is=$?
  last=$(tail -n 1 out)
  if [ "$is" != "$status" ] || [ "$last" != "$line" ]; then
    printf 'run.sh %s: ended with %s, "%s", expected %s, "%s"\n' "$*" "$is" "$last" "$status" "$line"
    cat out
    exit 1
  fi
}
has() { grep -q -E -e "$1" "$2" || { echo "$2 has no \"$1\""; cat "$2"; exit 1; }; }

expect 0 "failed: 0; not finished: 0; skipped: 0; of 3" kernels
has '--filter \*/!\(bench\*\|profile\|times\) ' calls # nothing that measures beside others, and slabs is run
rm calls

# Nothing found is not clean: three sanitizers were stopped.
export DN_OTHERS_LIMIT=4
expect 3 "failed: 0; not finished: 3; skipped: 0; of 9" sanitize
has '^part +memcheck.slow .*stopped after [34] s, nothing found until then' out
has '!\(bench\*\|profile\|times\|slabs\) ' calls

export DN_OTHERS_LIMIT=0
expect 9 "failed: 0; not finished: 9; skipped: 0; of 9" sanitize
has '^NOT RUN +racecheck.good' out
unset DN_OTHERS_LIMIT

# What a sanitizer finds counts whatever the exit status, and a failure beside a limit that was reached.
script bin/tests/gpu_test_good "[ -z \"\${SANITIZED:-}\" ] || echo '========= Invalid __global__ read of size 4'; exit 0"
DN_OTHERS_LIMIT=4 expect 6 "failed: 3; not finished: 3; skipped: 0; of 9" sanitize
script bin/tests/gpu_test_good "exit 7"
expect 1 "failed: 1; not finished: 0; skipped: 0; of 3" kernels
script bin/tests/gpu_test_slow "exec sleep 60"
DN_TESTS_LIMIT=4 expect 2 "failed: 1; not finished: 1; skipped: 0; of 3" kernels
has '^TIME +kernels.slow' out
