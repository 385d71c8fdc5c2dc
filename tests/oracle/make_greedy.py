#!/usr/bin/env python3
"""Makes tests/fixtures/greedy.json, what tests/bench/logits.c follows: 512 greedy tokens behind each of four prompts of a model,
whatever they end with, and the reference's margin between its two best tokens at each of them.

    python3 -m venv v && v/bin/pip install torch transformers compressed-tensors gguf accelerate
    v/bin/python tests/oracle/make_greedy.py tests/fixtures mini-kimi mini-kimi-int4 SmolLM2-135M-Instruct.Q4_1.gguf

Float32 arithmetic on the published (GGUF: dequantised) weights, eager attention, a token a step. Prompts are named, not
copied: "begin-end" is a part of the text in tests/fixtures/kimi_reference.json, others are prompts of the reference.json
that lies with the model, or of tests/fixtures/smollm2_reference.json. Small models soon say the same again and again; the parts are
those whose continuation has the most different tokens, of some dozens tried. Models that are not named stay as they are in
the file.
"""
import json
import os
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

N_GREEDY = 512
PROMPTS = {
    "mini-kimi": ["text", "long", "560-656", "1400-1424"],
    "mini-kimi-int4": ["text", "long", "760-784", "1560-1584"],
}


def follow(model, prompt):
    """Greedy ids and margins; how many of them a single pass over prompt and ids would have chosen as well."""
    ids, margins, past, step = [], [], None, torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(N_GREEDY):
            o = model(input_ids=step, past_key_values=past, use_cache=True)
            past = o.past_key_values
            best = torch.topk(o.logits[0, -1], 2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = torch.tensor([ids[-1:]])
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return ids, [float(f"{m:.3g}") for m in margins], sum(a == b for a, b in zip(logits.argmax(-1).tolist(), ids))


def open_model(path):
    if path.endswith(".gguf"):
        folder, file = os.path.split(os.path.abspath(path))
        return AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    from kimi_lib import load

    return load(path)


def prompts(path, name, fixtures):
    read = lambda file: json.load(open(file))
    if path.endswith(".gguf"):
        return {p["name"]: p["ids"] for p in read(os.path.join(fixtures, "smollm2_reference.json"))["prompts"]}
    drawn = read(os.path.join(fixtures, "kimi_reference.json"))[name]["ids"]
    published = {p["name"]: p["token_ids"] for p in read(os.path.join(path, "reference.json"))["prompts"]}
    out = {}
    for prompt in PROMPTS[name]:
        begin, dash, end = prompt.partition("-")
        out[prompt] = drawn[int(begin) : int(end)] if dash else published[prompt]
    return out


def main():
    torch.set_num_threads(1)
    fixtures = sys.argv[1]
    file = os.path.join(fixtures, "greedy.json")
    result = json.load(open(file)) if os.path.exists(file) else {}
    result["transformers"] = transformers.__version__
    for path in sys.argv[2:]:
        name = "smollm2" if path.endswith(".gguf") else os.path.basename(path.rstrip("/"))
        model = open_model(path)
        result[name] = []
        for key, prompt in prompts(path, name, fixtures).items():
            ids, margins, same = follow(model, prompt)
            result[name].append({"prompt": key, "ids": ids, "margin": margins})
            print(f"{name} {key}: {len(set(ids))} different ids, smallest margin {min(margins)}, in one pass {same}", flush=True)
    with open(file, "w") as f:
        f.write(json.dumps(result, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"') + "\n")


main()
