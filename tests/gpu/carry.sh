#!/bin/sh
# Packs what the GPU tests need into a folder that can be carried to a machine with a GPU but without this project's
# packages, and runs it there:
#     tests/gpu/carry.sh BUILD_DIR FOLDER [PYTHON]     here; about 60 MB. PYTHON 3.x wheels of the clients, e.g. 3.12
#     FOLDER/run.sh [kernels] [engine] [clients] [sanitize] [bench]   there; all but the last two if none is named
# Shared libraries travel along, except the C library and CUDA's own.
set -eu

build=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/../.." && pwd)
data=${DN_SHARED_DATA:-$source/../shared/data}
mkdir -p "$2" && out=$(cd "$2" && pwd)
rm -rf "${out:?}"/bin "$out"/lib "$out"/source "$out"/data "$out"/wheels
mkdir -p "$out/bin/tests" "$out/lib" "$out/source" "$out/data/mini"

cp "$build"/dunlin "$build"/libdunlin-cuda.so "$out/bin/"
for program in "$build"/tests/gpu_test_* "$build"/tests/engine_test_kimi "$build"/tests/engine_test_forward_kimi \
    "$build"/tests/engine_test_forward_llama "$build"/tests/sched_test_* "$build"/tests/lib*.so; do
    [ -f "$program" ] && cp "$program" "$out/bin/tests/"
done
strip --strip-debug "$out"/bin/dunlin "$out"/bin/*.so "$out"/bin/tests/* 2>/dev/null || true
for program in "$out"/bin/dunlin "$out"/bin/tests/gpu_test_*; do
    ldd "$program" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p'
done | sort -u | grep -v -E '/(libc|libm|libpthread|libdl|librt|libcublas[^/]*|libcuda[^/]*)\.so' |
    while read -r library; do cp -L "$library" "$out/lib/"; done

mkdir -p "$out/source/tests"
cp -r "$source/tests/clients" "$source/tests/fixtures" "$out/source/tests/"
cp -r "$source/policies" "$source/conf" "$source/lua" "$out/source/"
for mini in mini-kimi mini-kimi-int4; do
    [ -d "$data/mini/$mini" ] && cp -r "$data/mini/$mini" "$out/data/mini/"
done
[ -f "$data/mini/heldout.txt" ] && cp "$data/mini/heldout.txt" "$out/data/mini/"
if [ $# -gt 2 ]; then
    "${DN_PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "$3" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$out/wheels" -r "$source/tests/clients/requirements.txt"
fi
# The programs name these folders by the paths that they were built with.
printf 'built_source=%s\nbuilt_build=%s\nbuilt_data=%s\n' "$source" "$build" "$data" > "$out/paths"
cp "$source/tests/gpu/run.sh" "$out/run.sh"
du -sh "$out"
