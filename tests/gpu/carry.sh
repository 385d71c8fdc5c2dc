#!/bin/bash
# Packs what the GPU tests need into a folder that can be carried to a machine with a GPU but without this project's
# packages:
#     tests/gpu/carry.sh BUILD_DIR FOLDER [PYTHON]     PYTHON 3.x: wheels of the clients for the Python there, e.g. 3.12
#     FOLDER/run.sh [PARTS...]                         there: see run.sh
#     tests/gpu/carry.sh BUILD_DIR FOLDER --model FILE.gguf
#     FOLDER/part2/run.sh model                        there
# Shared libraries travel along, except the C library and CUDA's own. About 50 MB, half of it the trained miniatures.
# --model: SmolLM2 and what measures it, in two folders of half the size each, part1 and part2, for machines that take
# only so much at a time; they must end up beside each other.
set -euo pipefail

build=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/../.." && pwd)
data=${DN_SHARED_DATA:-$source/../shared/data}
mkdir -p "$2" && out=$(cd "$2" && pwd)
python=${3:-}
rm -rf "${out:?}"/{pack,bin,lib,site,source,data,wheels,paths,programs.tar.gz,part1,part2}

# programs FOLDER TEST_PROGRAMS...: into FOLDER/programs.tar.gz, stripped; much of the CUDA backend is alike.
programs() {
  local to=$1 pack=$1/pack program library
  shift
  mkdir -p "$pack"/{bin/tests,lib}
  cp "$build"/dunlin "$build"/libdunlin-cuda.so "$pack/bin/"
  for program in "$@"; do cp "$build/tests/$program" "$pack/bin/tests/"; done
  find "$pack/bin" -type f -exec strip --strip-debug {} +
  find "$pack/bin" -type f ! -name 'lib*' -exec ldd {} + | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | sort -u |
    grep -v -E '/(libc|libm|libpthread|libdl|librt|libcublas[^/]*|libcuda[^/]*)\.so' |
    while read -r library; do cp -L "$library" "$pack/lib/"; done
  chmod -R u+w "$pack"
  strip --strip-debug "$pack"/lib/*
  tar -C "$pack" -czf "$to/programs.tar.gz" bin lib
  rm -rf "$pack"
}

if [ "$python" = --model ]; then
  file=${4:?--model FILE.gguf}
  mkdir -p "$out"/part1 "$out"/part2/source/tests/fixtures
  programs "$out/part2" logits
  cp "$source"/tests/fixtures/{greedy,smollm2_reference}.json "$out/part2/source/tests/fixtures/"
  cp "$source/tests/gpu/run.sh" "$out/part2/"
  chmod +x "$out/part2/run.sh"
  sha256sum < "$file" > "$out/part2/model.sha256"
  first=$((($(stat -L -c %s "$file") + $(du -sb "$out/part2" | cut -f 1)) / 2))
  head -c "$first" "$file" > "$out/part1/model.1"
  tail -c "+$((first + 1))" "$file" > "$out/part2/model.2"
  du -sh "$out/part1" "$out/part2"
  exit
fi

mkdir -p "$out"/source/tests "$out"/data/mini
mapfile -t gpu_tests < <(cd "$build/tests" && ls -d gpu_test_*)
programs "$out" "${gpu_tests[@]}" engine_test_{kimi,forward_kimi} libbackend_{lost,fault}.so logits

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
