#!/bin/bash
# Packs what the GPU tests need into a folder that can be carried to a machine with a GPU but without this project's
# packages:
#     tests/gpu/carry.sh BUILD_DIR FOLDER [PYTHON]     PYTHON 3.x: wheels of the clients for the Python there, e.g. 3.12
#     FOLDER/run.sh [PARTS...]                         there: see run.sh
# Shared libraries travel along, except the C library and CUDA's own. About 50 MB, half of it the trained miniatures.
set -euo pipefail

build=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/../.." && pwd)
data=${DN_SHARED_DATA:-$source/../shared/data}
mkdir -p "$2" && out=$(cd "$2" && pwd)
python=${3:-}
rm -rf "${out:?}"/{pack,bin,lib,site,source,data,wheels,paths,programs.tar.gz}
mkdir -p "$out"/pack/{bin/tests,lib} "$out"/source/tests "$out"/data/mini

# Programs and libraries: stripped and packed, since much of the CUDA backend is alike.
cp "$build"/dunlin "$build"/libdunlin-cuda.so "$out/pack/bin/"
cp "$build"/tests/gpu_test_* "$build"/tests/engine_test_{kimi,forward_kimi} "$build"/tests/sched_test_{sched,split,faults} \
  "$build"/tests/libbackend_{lost,fault}.so "$out/pack/bin/tests/"
find "$out/pack/bin" -type f -exec strip --strip-debug {} +
for program in "$out"/pack/bin/dunlin "$out"/pack/bin/tests/*_test_*; do
  ldd "$program" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p'
done | sort -u | grep -v -E '/(libc|libm|libpthread|libdl|librt|libcublas[^/]*|libcuda[^/]*)\.so' |
  while read -r library; do cp -L "$library" "$out/pack/lib/"; done
chmod -R u+w "$out/pack"
strip --strip-debug "$out"/pack/lib/*
tar -C "$out/pack" -czf "$out/programs.tar.gz" bin lib
rm -rf "$out/pack"

cp -r "$source/tests/clients" "$source/tests/fixtures" "$out/source/tests/"
rm -rf "$out"/source/tests/clients/{__pycache__,http_*}
cp -r "$source/policies" "$source/conf" "$source/lua" "$out/source/"
for mini in mini-kimi mini-kimi-int4; do
  if [ -d "$data/mini/$mini" ]; then cp -r "$data/mini/$mini" "$out/data/mini/"; else echo "no $data/mini/$mini: its tests will be skipped"; fi
done
for file in heldout.txt chat_eval.jsonl; do
  [ ! -f "$data/mini/$file" ] || cp "$data/mini/$file" "$out/data/mini/"
done
config=$data/model_configs/moonshotai--Kimi-K2.5.config.json # for bench decode; K2.6's text model is the same
[ ! -f "$config" ] || cp "$config" "$out/data/kimi.config.json"
if [ -d "$data/requests" ]; then cp -r "$data/requests" "$out/data/"; fi
chmod -R u+w "$out/data"

# Wheels are kept beside the folder for the next time.
if [ -n "$python" ]; then
  pins=$source/tests/clients/requirements.txt wheels=$(dirname "$out")/wheels-$python
  if ! cmp -s "$pins" "$wheels/pins.txt"; then
    rm -rf "$wheels"
    "${DN_PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
      --python-version "$python" --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 -d "$wheels" -r "$pins"
    cp "$pins" "$wheels/pins.txt"
  fi
  mkdir -p "$out/wheels" && cp "$wheels"/*.whl "$out/wheels/"
  echo "$python" > "$out/wheels/python"
fi

cp "$source/tests/gpu/run.sh" "$out/run.sh"
chmod +x "$out/run.sh"
du -sh "$out"
