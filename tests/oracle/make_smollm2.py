#!/usr/bin/env python3
"""Makes tests/fixtures/smollm2_reference.json: what transformers computes for SmolLM2-135M-Instruct Q4_1.

    python3 -m venv v && v/bin/pip install torch transformers gguf accelerate
    v/bin/python tests/oracle/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf tests/fixtures/smollm2_reference.json

The file is dequantised by transformers (gguf_file=) and run in float32 with eager attention. For each prompt: its ids, 64 greedy
tokens, and for every position that predicts one of them (and some inside the prompt) the twenty largest logits and every
193rd one.
"""
import json
import os
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

STRIDE = 193
N_GREEDY = 64


def chat(text):
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


PROMPTS = {
    "capital": chat("What is the capital of France?"),
    "birds": chat("Write two sentences about small birds at the sea."),
    "story": "Once upon a time, in a village by the sea, there lived",
    "code": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
}


def row(logits):
    top = torch.topk(logits, 20)
    return {
        "top_id": top.indices.tolist(),
        "top_logit": [round(v, 4) for v in top.values.tolist()],
        "every": [round(v, 4) for v in logits[::STRIDE].tolist()],
    }


def main():
    path, out = sys.argv[1:3]
    folder, name = os.path.split(os.path.abspath(path))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    result = {"transformers": transformers.__version__, "stride": STRIDE, "prompts": []}
    for key, text in PROMPTS.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            full = list(ids)
            past = None
            step = torch.tensor([ids])
            for _ in range(N_GREEDY):
                o = model(input_ids=step, past_key_values=past, use_cache=True)
                past = o.past_key_values
                nxt = int(o.logits[0, -1].argmax())
                full.append(nxt)
                step = torch.tensor([[nxt]])
            logits = model(input_ids=torch.tensor([full])).logits[0]
        greedy = full[len(ids):]
        check = logits[len(ids) - 1 : -1].argmax(-1).tolist()
        assert check == greedy, "prefill and step by step disagree in the reference"
        positions = sorted({3, len(ids) - 1, len(ids) + 15, len(ids) + 47})
        margins = torch.topk(logits[len(ids) - 1 : -1], 2).values
        result["prompts"].append({
            "name": key, "ids": ids, "greedy": greedy,
            "text": tokenizer.decode(greedy, skip_special_tokens=False),
            "margin": [round(float(a - b), 4) for a, b in margins],
            "rows": [dict(position=p, **row(logits[p])) for p in positions],
        })
        print(key, repr(result["prompts"][-1]["text"][:100]), flush=True)
    with open(out, "w") as f:
        f.write(json.dumps(result, separators=(",", ":")).replace('{"name"', '\n{"name"').replace('{"position"', '\n{"position"') + "\n")


main()
