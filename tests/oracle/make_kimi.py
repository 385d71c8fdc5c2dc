#!/usr/bin/env python3
"""Makes tests/fixtures/kimi_reference.json: what transformers computes for the trained miniatures of Kimi K2.

    python3 -m venv v && v/bin/pip install torch transformers compressed-tensors
    v/bin/python tests/oracle/make_kimi.py tests/fixtures/kimi_reference.json mini-kimi mini-kimi-int4

Float32 arithmetic on the published weights, eager attention. For each model a text of 1,600 tokens that the model drew itself
(temperature 1: as long as YaRN stretches it, and no one's property), the twenty largest logits, every 61st one and the experts
of the last layer at some of its positions; and four greedy continuations of 128 tokens with the margin of each token.
"""
import json
import sys

import torch
import transformers
from kimi_lib import chosen_experts, load

STRIDE = 61
N_DRAWN, N_GREEDY = 1600, 128
PROMPTS = [(0, 24), (200, 240), (512, 576), (1000, 1400)]
POSITIONS = [0, 1, 5, 17, 40, 99, 128, 200, 255, 256, 399, 512, 640, 777, 900, 1023, 1024, 1100, 1200, 1301, 1400, 1500, 1599]


def extend(model, ids, n, pick):
    ids, past, step = list(ids), None, torch.tensor([ids])
    with torch.no_grad():
        for _ in range(n):
            o = model(input_ids=step, past_key_values=past, use_cache=True)
            past = o.past_key_values
            ids.append(int(pick(o.logits[0, -1])))
            step = torch.tensor([ids[-1:]])
    return ids


def row(logits, experts, p):
    top = torch.topk(logits[p], 20)
    return {
        "position": p,
        "top_id": top.indices.tolist(),
        "top_logit": [round(v, 4) for v in top.values.tolist()],
        "every": [round(v, 4) for v in logits[p][::STRIDE].tolist()],
        "experts": experts[p],
    }


def greedy(model, prompt):
    ids = extend(model, prompt, N_GREEDY, torch.argmax)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == ids[len(prompt):], "prefill and step by step disagree in the reference"
    best = torch.topk(logits, 2).values
    return {"ids": ids[len(prompt):], "margin": [round(float(a - b), 4) for a, b in best]}


def reference(folder):
    model = load(folder)
    dice = torch.Generator().manual_seed(1)
    draw = lambda logits: torch.multinomial(torch.softmax(logits, -1), 1, generator=dice)
    ids = extend(model, [1000], N_DRAWN - 1, draw)
    experts, logits = chosen_experts(model, ids)
    out = {"ids": ids, "rows": [row(logits, experts, p) for p in POSITIONS], "greedy": []}
    for begin, end in PROMPTS:
        out["greedy"].append({"begin": begin, "end": end, **greedy(model, ids[begin:end])})
    return out


def main():
    torch.set_num_threads(1)
    result = {"transformers": transformers.__version__, "stride": STRIDE}
    for folder in sys.argv[2:]:
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        result[name] = reference(folder)
        print(name, "done", flush=True)
    with open(sys.argv[1], "w") as f:
        text = json.dumps(result, separators=(",", ":"))
        for key in ('{"position"', '{"begin"', '"ids"'):
            text = text.replace(key, "\n" + key)
        f.write(text + "\n")


main()
