#!/bin/bash
# Runs what carry.sh packed, on a machine with a GPU:
#     FOLDER/run.sh [kernels] [engine] [clients] [logits] [sanitize] [bench] [model]      the first four if none is named
#   kernels   each operation against float64, and faults: all programs at once, but for tests that measure (bench has them)
#   engine    Kimi's graph and miniatures on the GPU
#   clients   real clients against `dunlin serve` on the GPU (needs the Python that the wheels are for); DN_CLIENTS: which
#   logits    the miniatures in every format against transformers, as a table; CSV lies with the logs
#   sanitize  memcheck, racecheck and initcheck of the kernels' tests, each as far as its time goes
#   bench     `dunlin bench` (kernels; decode and prefill of the first layers of Kimi K2, made up), then the timings
#             of the kernels' tests, one after the other; CSV lies with the logs
#   model     of carry.sh --model alone: SmolLM2's logits against transformers, a question, `dunlin bench decode`
# Every program has a time limit, and each of [kernels engine clients logits], sanitize, bench and model one in all, so
# that machines that are lent by the minute do not run on. Ends with one table; logs in $DN_LOGS (default
# /tmp/dunlin-gpu, and a copy as $OUT/gpu-logs.tgz). Exit status: how many failed or did not finish, 100 at most; the last
# line has each by itself. Not finished: TIME (a test stopped by its limit), part (a sanitizer stopped by it, which had
# found nothing until then), NOT RUN (no time was left). Without a GPU what needs one is skipped, and the table says so.
cd "$(dirname "$0")" || exit 1
here=$PWD
logs=${DN_LOGS:-/tmp/dunlin-gpu}
rm -rf "$logs" && mkdir -p "$logs" || exit 1
[ $# -gt 0 ] || set -- kernels engine clients logits
cores=$(nproc)

[ -d bin ] || tar xzf programs.tar.gz || exit 1
export DN_CUDA_LIBRARY=$here/bin/libdunlin-cuda.so DN_SHARED_DATA=$here/data DN_TEST_DATA=$here/data \
  DN_TEST_FIXTURES=$here/source/tests/fixtures
libraries=$here/lib
cublas=$(ldconfig -p 2>/dev/null | sed -n 's/.*libcublasLt.so.13 .*=> //p' | head -n 1)
[ -n "$cublas" ] || cublas=$(find /usr/local /usr/lib /opt -name libcublasLt.so.13 2>/dev/null | head -n 1)
[ -z "$cublas" ] || libraries=$libraries:$(dirname "$cublas")
[ -z "${LD_LIBRARY_PATH:-}" ] || libraries=$libraries:$LD_LIBRARY_PATH

gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader 2>/dev/null | head -n 1)
if [ -n "$gpu" ]; then export DN_GPU_REQUIRED=1; else unset DN_GPU_REQUIRED; fi
echo "${gpu:-no GPU: what needs one is skipped}; $cores cores; cuBLASLt ${cublas:-not found}"

# ---- jobs: in the background, as many as `width`, until `deadline` -----------------------------------------------------

width=1 deadline=0

# What a log says of itself in one line.
digest() {
  grep -h -o -E 'Synthesis: .*|ERROR SUMMARY: .*|RACECHECK SUMMARY: .*|[0-9]+ (passed|failed|skipped|error)[^=]*in [0-9.]+s.*' \
    "$1" | sed -E 's/Synthesis: //; s/ *[|]/,/g; s/ +$//' |
    awk '{ n[$0]++ } END { for (line in n) print (n[line] > 1 ? n[line] " x " : "") line }' | sort -r | head -n 3 | paste -s -d ';'
}

# one NAME LIMIT COMMAND...: runs it and adds its line to the table.
one() {
  local name=$1 limit=$2 start=$SECONDS log=$logs/$1.log rc=0 state what left=$((deadline - SECONDS))
  shift 2
  if ((left < limit)); then limit=$left; fi
  if ((limit < 3)); then
    echo "NOT RUN|$name|0|no time was left" >> "$logs/table"
    return
  fi
  LD_LIBRARY_PATH=$libraries timeout -k 3 "$limit" "$@" > "$log" 2>&1 < /dev/null || rc=$?
  what=$(digest "$log")
  state=ok
  if [ $rc = 124 ] || [ $rc = 137 ]; then
    state=TIME what="stopped after $limit s; $what"
    case $name in memcheck.* | racecheck.* | initcheck.*) state=part what="stopped after $limit s, nothing found until then" ;; esac
  elif [ $rc != 0 ]; then
    state=FAILED what="exit $rc; $what"
  elif grep -q '^SKIPPED: ' "$log" || grep -q -E '^[^=]*\b[0-9]+ skipped' "$log"; then
    grep -q -E 'Passing: [1-9]|[0-9]+ passed' "$log" && ! grep -q '^SKIPPED: no GPU' "$log" || state=skip
    what="$what; skipped: $(grep -h -E '^SKIPPED[: ]' "$log" | sed -E 's/^SKIPPED:? *(\[[0-9]+\])? *//; s/^[^ ]*\.py:[0-9]+: //' | sort -u |
      head -n 3 | cut -c 1-60 | paste -s -d ';')"
  fi
  if grep -q -E "$found" "$log"; then state=FAILED; fi # whatever the exit status: these come from processes of the test's
  echo "$state|$name|$((SECONDS - start))|$what" >> "$logs/table"
}
# What a sanitizer says when it finds something.
found='^=========.*(Invalid|Uninitialized|[Rr]ace reported|Program hit|Misaligned|Barrier error|out of range|SUMMARY: [1-9])'

start() { # NAME LIMIT COMMAND...
  while (($(jobs -rp | wc -l) >= width)); do wait -n; done
  one "$@" &
}

# ---- parts ------------------------------------------------------------------------------------------------------------

measures='bench*|profile|times' # tests that want the GPU for themselves
slow='slabs'                    # tests of a size that takes a sanitizer all of its time

kernels() {
  width=$cores
  for t in bin/tests/gpu_test_*; do start "kernels.${t##*gpu_test_}" 60 "$t" --jobs 1 --filter "*/!($measures)" --timeout 60; done
  wait
}

engine() {
  width=$cores
  for unit in forward_kimi kimi; do # as tests/cmake/tests_gpu.cmake
    start "engine.$unit" 80 env DN_TEST_LIBRARY="$DN_CUDA_LIBRARY" bin/tests/engine_test_$unit --jobs 2 --timeout 80 \
      --filter "*/@(head_sizes|batch|weights_in|logits|greedy|the_ref)*"
  done
  wait
}

# A Python of the version that the wheels are for.
find_python() {
  local version python
  version=$(cat wheels/python 2>/dev/null) || return 1
  for python in "python$version" python3 /opt/*/.venv/bin/python3 /opt/*/bin/python3; do
    python=$(command -v "$python") || continue
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
      echo "$python"
      return
    fi
  done
  return 1
}

clients() {
  local python t
  if ! python=$(find_python); then
    echo "skip|clients|0|no Python $(cat wheels/python 2>/dev/null || echo "(and no wheels were packed)")" >> "$logs/table"
    return
  fi
  if [ ! -d site ]; then # wheels are archives of what belongs there; no pip is needed
    for t in wheels/*.whl; do "$python" -m zipfile -e "$t" site || return; done
  fi
  # Only the program gets our libraries: Python has its own libssl.
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/bin/dunlin.program "$@"\n' "$libraries" "$here" > bin/dunlin.new
  [ -e bin/dunlin.program ] || mv bin/dunlin bin/dunlin.program
  mv bin/dunlin.new bin/dunlin && chmod +x bin/dunlin
  width=$(((cores + 1) / 2))
  for t in ${DN_CLIENTS:-kimi policies load cancel openai commands keys errors drain device tools}; do
    [ -f "source/tests/clients/test_$t.py" ] || continue
    start "clients.$t" 120 env -u LD_LIBRARY_PATH PYTHONPATH="$here/site" DN_DUNLIN="$here/bin/dunlin" "$python" -B -m pytest -q -rs \
      -p no:cacheprovider --rootdir source/tests/clients "source/tests/clients/test_$t.py"
  done
  wait
}

sanitize() {
  local tool t sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [ -z "$gpu" ] || [ -z "$sanitizer" ]; then
    echo "skip|sanitize|0|no GPU or no compute-sanitizer" >> "$logs/table"
    return
  fi
  width=$cores
  export DN_GPU_SMALL=1
  for tool in memcheck racecheck initcheck; do
    for t in bin/tests/gpu_test_*; do
      start "$tool.${t##*gpu_test_}" 55 "$sanitizer" --tool $tool --target-processes all --error-exitcode 9 "$t" --jobs 1 \
        --filter "*/!($measures|$slow)" --timeout 55
    done
  done
  wait
  unset DN_GPU_SMALL
}

logits() {
  local name
  if [ -z "$gpu" ]; then
    echo "skip|logits|0|no GPU" >> "$logs/table"
    return
  fi
  width=2
  for name in mini-kimi mini-kimi-int4; do
    start "logits.$name" 50 bin/tests/logits $name --device cuda --csv "$logs/logits.$name.csv"
  done
  wait
  cat "$logs"/logits.*.log
}

# steps NAME LIMIT decode|prefill LAYERS OPTIONS...: steps of Kimi K2's first layers.
steps() {
  local name=$1 limit=$2 what=$3 layers=$4
  shift 4
  start "bench.$name" "$limit" bin/dunlin bench "$what" --synthetic data/kimi.config.json --layers "$layers" --device cuda \
    --csv "$logs/$name.csv" "$@"
}

# What matters most comes first. On 139 GiB: 8 layers in INT4 are 74 GB, 4 in BF16 107, 6 in FP8 91; the rest is for
# 64 contexts of 32k in both formats.
bench() {
  width=1
  if [ -n "$gpu" ]; then
    start bench.kernels 30 bin/dunlin bench kernels --device cuda --batch 64 --csv "$logs/kernels.csv"
    if [ -f data/kimi.config.json ]; then
      steps int4 45 decode 8 --weights int4 --batch 1,16,64 --context 8k,1k,32k --kv bf16,fp8,mixed --integrity off,tag \
        --rounds 3 --ms 50
      steps fp8 25 decode 6 --weights fp8 --batch 1,16,64 --context 8k,1k,32k --kv bf16,fp8 --rounds 3 --ms 40
      steps bf16 25 decode 4 --weights bf16 --batch 1,16,64 --context 8k,1k,32k --kv bf16,fp8 --rounds 3 --ms 40
      steps prefill 25 prefill 8 --weights int4 --context 1k,8k,32k --kv bf16,fp8 --rounds 1 --ms 1
    fi
  fi
  # First what is right or wrong: that a first prefill takes no memory and no longer than the next.
  for t in bin/tests/gpu_test_start $(ls -d bin/tests/gpu_test_* | grep -v _start$); do
    start "bench.${t##*gpu_test_}" 30 "$t" --jobs 1 --filter "*/@(bench*|times)" --timeout 30
  done
  wait
  for t in "$logs"/bench.{kernels,int4,fp8,bf16,prefill}.log; do [ ! -f "$t" ] || grep -v '[0-9]% ' "$t"; done
  grep -h BENCH "$logs"/bench.*.log
}

# The two parts of carry.sh --model.
model() {
  local file=$here/data/model.gguf
  mkdir -p data
  if [ ! -f "$file" ]; then
    if [ ! -f ../part1/model.1 ] || [ ! -f model.2 ]; then
      echo "FAILED|model|0|expected $here/model.2 and $(dirname "$here")/part1/model.1" >> "$logs/table"
      return
    fi
    cat ../part1/model.1 model.2 > "$file"
  fi
  if [ "$(sha256sum < "$file")" != "$(cat model.sha256)" ]; then
    echo "FAILED|model|0|$file is not the file that was packed" >> "$logs/table"
    return
  fi
  width=1
  export DN_TEST_MODEL=$file
  start model.question 20 bin/dunlin chat "$file" -p "What is the capital of France?" --temperature 0 --device cuda --max-tokens 40 \
    --verbose --quiet
  start model.logits 80 bin/tests/logits smollm2 --device cuda --csv "$logs/model.logits.csv"
  start model.decode 50 bin/dunlin bench decode "$file" --weights auto,bf16,fp8 --device cuda --batch 1,16,64 --context 1k,8k \
    --kv bf16,fp8,mixed --integrity off,tag --rounds 3 --ms 30 --csv "$logs/model.decode.csv"
  wait
  for t in question logits decode; do grep -v '[0-9]% ' "$logs/model.$t.log"; done
  grep -q Paris "$logs/model.question.log" || echo "FAILED|model.answer|0|the answer does not name Paris" >> "$logs/table"
}

lasts() { # SECONDS PARTS...: parts with one limit in all
  deadline=$((SECONDS + $1))
  shift
  for part in "$@"; do
    case $part in kernels | engine | clients | logits | sanitize | bench | model) $part ;; *) echo "no part \"$part\"" >&2 ;; esac
  done
}

tests=() others=()
for part in "$@"; do case $part in sanitize | bench | model) others+=("$part") ;; *) tests+=("$part") ;; esac; done
[ ${#tests[@]} = 0 ] || lasts "${DN_TESTS_LIMIT:-225}" "${tests[@]}"
for part in "${others[@]}"; do lasts "${DN_OTHERS_LIMIT:-165}" "$part"; done

# ---- what came of it --------------------------------------------------------------------------------------------------

while IFS='|' read -r state name _; do
  case $state in
  FAILED | TIME)
    echo "---- $name"
    grep -s -E "^(dunlin|logits): |FAIL|Crash|CRASH|^E  |rror:|wrong|^=========|assert|WARNING" "$logs/$name.log" | grep -v "SUMMARY: 0" | cut -c 1-220 | head -n 25
    ;;
  esac
done < "$logs/table"
echo "---- table ($SECONDS s)"
sort -t '|' -k 2 "$logs/table" | awk -F '|' '{ printf "%-8s %-24s %4d s  %s\n", $1, $2, $3, substr($4, 1, 170) }'
failed=$(grep -c '^FAILED' "$logs/table") unfinished=$(grep -c -E '^(TIME|part|NOT RUN)' "$logs/table")
echo "failed: $failed; not finished: $unfinished; skipped: $(grep -c '^skip' "$logs/table"); of $(wc -l < "$logs/table")"
[ -z "${OUT:-}" ] || tar -C "$logs" -czf "$OUT/gpu-logs.tgz" .
exit $((failed + unfinished < 100 ? failed + unfinished : 100))
