#!/bin/bash
# Tokens a second of dunlin and of llama.cpp on the same file, in turn within one run: medians and their ratios.
#   against_llama.sh DUNLIN LLAMA_BENCH MODEL.gguf [ROUNDS [THREADS...]]
# llama-bench is llama.cpp's own; build it outside this project (e.g. from the sdist of llama-cpp-python, GGML_NATIVE=ON).
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,4p' "$0"; exit 2; }
dunlin=$1 llama=$2 model=$3 rounds=${4:-5}
shift $(($# > 4 ? 4 : $#))
threads=("$@")
[ ${#threads[@]} -gt 0 ] || threads=(1 2)
out=$(mktemp) table=$(mktemp)
trap 'rm -f "$out" "$table"' EXIT

for ((i = 0; i < rounds; i++)); do
  for t in "${threads[@]}"; do
    "$dunlin" bench "$model" --threads "$t" --rounds 1 --batch 1,16 --prompt 512 --output 128 --csv "$table" >/dev/null 2>&1
    awk -F, -v t="$t" 'NR > 1 { print "dunlin", t, $1 ($1 == "decode" ? "-batch" $6 : ""), $9 }' "$table" >>"$out"
    "$llama" -m "$model" -t "$t" -p 512 -n 128 -r 1 -o csv 2>/dev/null |
      python3 -c '
import csv, sys
for row in csv.DictReader(sys.stdin):
    kind = "prefill" if int(row["n_prompt"]) else "decode-batch1"
    print("llama.cpp", sys.argv[1], kind, row["avg_ts"])' "$t" >>"$out"
  done
  printf '\rround %d of %d' $((i + 1)) "$rounds" >&2
done
printf '\n' >&2
python3 - "$out" <<'E2'
import collections, statistics, sys
rates = collections.defaultdict(list)
for line in open(sys.argv[1]):
    who, threads, kind, rate = line.split()
    rates[int(threads), kind, who].append(float(rate))
print(f"{'THREADS':8}{'WHAT':16}{'DUNLIN':>9}{'LLAMA.CPP':>11}{'RATIO':>7}   LOW-HIGH (dunlin; llama.cpp)")
for threads, kind, who in sorted(rates):
    if who != "dunlin":
        continue
    ours, theirs = rates[threads, kind, who], rates.get((threads, kind, "llama.cpp"))
    a = statistics.median(ours)
    text = f"{threads:<8}{kind:16}{a:9.1f}"
    if theirs:
        b = statistics.median(theirs)
        text += f"{b:11.1f}{a / b:7.2f}   {min(ours):.0f}-{max(ours):.0f}; {min(theirs):.0f}-{max(theirs):.0f}"
    else:
        one = statistics.median(rates[threads, "decode-batch1", "dunlin"])
        text += f"{'':11}{'':7}   {min(ours):.0f}-{max(ours):.0f}; {a / one:.2f} x one sequence"
    print(text)
E2
