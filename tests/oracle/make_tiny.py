#!/usr/bin/env python3
"""Makes tests/fixtures/tiny_*.f32: logits of tiny Llama, Qwen2 and Qwen3 models by transformers, [40][256] float32.

All is float32 but the cache, which rounds K and V to bf16 as a KV cache of that format does: what is left is the order of sums.

    python3 -m venv v && v/bin/pip install torch transformers
    v/bin/python tests/oracle/make_tiny.py tests/fixtures

The weights come from a generator that tests/unit/engine/tiny_checkpoint.h repeats, so no checkpoint is stored: value i of a
tensor is the top byte of splitmix64(fnv1a64(name) + i), and all values are exact in bf16.
"""
import os
import sys

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

N_TOKENS = 40
IDS = [(7 * i * i + 3 * i + 11) % 256 for i in range(N_TOKENS)]
BASE = dict(vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)


def default_rope(theta):
    return dict(rope_type="default", rope_theta=theta)


MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=default_rope(1e5))),
    "llama3": (LlamaForCausalLM, LlamaConfig(**{**BASE, "tie_word_embeddings": False}, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**BASE, rope_parameters=default_rope(1e6))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**BASE, head_dim=48, rope_parameters=default_rope(1e6))),
}


class RoundingCache(DynamicCache):
    """K (after the rotary embedding) and V as bf16 holds them."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), *args, **kwargs)


def fnv1a(name):
    h = 0xCBF29CE484222325
    for c in name.encode():
        h = ((h ^ c) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def bytes_of(name, n):
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a(name)) + np.arange(n, dtype=np.uint64)
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(56)).astype(np.int64) - 128


def values(name, shape):
    i = bytes_of(name, int(np.prod(shape)))
    if name.endswith("norm.weight"):
        v = 1 + (i >> 3) / 128.0
    else:
        v = i / 512.0
    return torch.tensor(v.reshape(shape), dtype=torch.float32)


def main():
    for key, (cls, config) in MODELS.items():
        config._attn_implementation = "eager"
        model = cls(config).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values(name, tuple(p.shape)))
            exact = model(input_ids=torch.tensor([IDS])).logits[0]
            logits = model(input_ids=torch.tensor([IDS]), past_key_values=RoundingCache(), use_cache=True).logits[0]
            assert 0 < (exact - logits).abs().max() < 0.2
        logits.numpy().astype("<f4").tofile(os.path.join(sys.argv[1], f"tiny_{key}.f32"))
        print(key, logits.std().item(), logits[0, :4].tolist(), sorted(n for n, _ in model.named_parameters())[:3])


if __name__ == "__main__":
    main()
