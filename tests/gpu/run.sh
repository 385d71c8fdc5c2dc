#!/bin/bash
# Runs what carry.sh packed, on a machine with a GPU: see there. Ends with the number of parts that failed.
cd "$(dirname "$0")" || exit 1
here=$PWD
. ./paths
link() { [ -e "$2" ] || { mkdir -p "$(dirname "$2")" && ln -s "$1" "$2"; }; }
link "$here/source" "$built_source"
link "$here/bin" "$built_build"
link "$here/data" "$(dirname "$built_data")/$(basename "$built_data")"
cublas=$(ldconfig -p | sed -n 's/.*libcublasLt.so.13 .*=> //p' | head -1)
[ -n "$cublas" ] || cublas=$(find /usr/local /usr/lib /opt -name libcublasLt.so.13 2>/dev/null | head -1)
export LD_LIBRARY_PATH=$here/lib:$(dirname "$cublas"):${LD_LIBRARY_PATH:-}
export DN_CUDA_LIBRARY=$here/bin/libdunlin-cuda.so DN_GPU_REQUIRED=1 DN_SHARED_DATA=$here/data DN_TEST_DEVICE=$here/bin/libdunlin-cuda.so
[ $# -gt 0 ] || set -- kernels engine clients
failed=0
part() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    "$@" > "/tmp/dunlin-$name.log" 2>&1
    local rc=$?
    grep -E "SKIPPED|FAIL|wrong|Synthesis|rror:|passed|failed|ERROR SUMMARY|TABLE|RACECHECK SUMMARY" "/tmp/dunlin-$name.log" | tail -40
    echo "[$name: exit $rc, $((SECONDS - start)) s]"
    [ $rc -eq 0 ] || failed=$((failed + 1))
}
for what in "$@"; do
    case $what in
    kernels)
        for t in bin/tests/gpu_test_*; do part "$(basename "$t")" "$t" --jobs 2 --filter '!(*bench*)/!(bench*)' --timeout 240; done
        ;;
    engine)
        for t in bin/tests/engine_test_* bin/tests/sched_test_*; do part "$(basename "$t")" "$t" --jobs 2 --timeout 240; done
        ;;
    clients)
        python3 -m pip install -q --no-index --no-deps --target /tmp/dunlin-site wheels/*.whl
        export PYTHONPATH=/tmp/dunlin-site DN_DUNLIN=$here/bin/dunlin
        for t in source/tests/clients/test_*.py; do
            part "$(basename "$t" .py)" timeout 300 python3 -B -m pytest -q -rs -x -p no:cacheprovider --rootdir source/tests/clients "$t"
        done
        ;;
    sanitize)
        for tool in memcheck racecheck initcheck; do
            for t in bin/tests/gpu_test_*; do
                DN_GPU_SMALL=1 part "$tool-$(basename "$t")" timeout 280 compute-sanitizer --tool $tool --target-processes all \
                    --error-exitcode 9 "$t" --jobs 1 --filter '!(*bench*)/!(bench*)'
            done
        done
        ;;
    bench)
        for t in bin/tests/gpu_test_*; do part "bench-$(basename "$t")" "$t" --jobs 1 --filter '*/bench*'; grep BENCH "/tmp/dunlin-bench-$(basename "$t").log"; done
        ;;
    esac
done
echo "$failed parts failed"
exit $failed
