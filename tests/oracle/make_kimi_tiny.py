#!/usr/bin/env python3
"""Makes tests/fixtures/tiny_{kimi,moonlight,many}*.f32: logits of tiny models of the Kimi K2 graph by transformers, [40][256] float32, behind them
the experts of the last layer, sorted, [40][top k] as float32.

    python3 -m venv v && v/bin/pip install torch transformers compressed-tensors
    v/bin/python tests/oracle/make_kimi_tiny.py tests/fixtures [name ...]

All is float32 but what the cache keeps, the normed latent and the rotated rope key, which are rounded to bf16 as a KV cache of
that format does: what is left is the order of sums. Of quantised checkpoints the projections from the latent, and FP8 that does
not lie in whole blocks, go through bf16, as they do in the engine.

The weights come from a generator that tests/unit/engine/kimi_tiny.h repeats, so no checkpoint is stored: byte i of a tensor is
the top byte of splitmix64(fnv1a64(name) + i). INT4 words are checked against compressed-tensors' own packing.
"""
import sys

import numpy as np
import torch
import transformers.models.deepseek_v3.modeling_deepseek_v3 as deepseek
from compressed_tensors.compressors import pack_to_int32
from kimi_lib import build, dequantise_fp8, dequantise_int4
from make_tiny import IDS, bytes_of
from transformers import DeepseekV3Config

YARN = dict(rope_type="yarn", rope_theta=50000.0, factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0)
KIMI = dict(vocab_size=256, hidden_size=128, intermediate_size=192, moe_intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
            n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.827, q_lora_rank=128,
            kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=128, max_position_embeddings=512,
            rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=YARN)
MOONLIGHT = {**KIMI, "q_lora_rank": None, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
             "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.25, "num_hidden_layers": 2,
             "rope_parameters": dict(rope_type="default", rope_theta=50000.0)}
MANY = {**KIMI, "n_routed_experts": 1024, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 3, "moe_intermediate_size": 32,
        "hidden_size": 64, "first_k_dense_replace": 2}
# Kimi's own head sizes, which are all that the CUDA backend's attention knows.
WIDE = {**KIMI, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 256, "n_routed_experts": 32,
        "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
# name: config, form of the experts, form of the other linear matrices
MODELS = {"kimi": (KIMI, "bf16", "bf16"), "kimi_fp8": (KIMI, "fp8", "fp8"), "kimi_int4": (KIMI, "int4", "bf16"),
          "moonlight": (MOONLIGHT, "bf16", "bf16"),
          "moonlight_int4": (MOONLIGHT, "int4", "int4"), "many": (MANY, "bf16", "bf16"),
          "wide": (WIDE, "bf16", "bf16"), "wide_fp8": (WIDE, "fp8", "fp8"), "wide_int4": (WIDE, "int4", "bf16")}


def draw(name, shape):
    return torch.tensor(bytes_of(name, int(np.prod(shape))).reshape(shape))


def plain(name, shape):
    i = draw(name, shape).double()
    if name.endswith("norm.weight"):
        i = 1 + torch.div(i, 8, rounding_mode="floor") / 128
    elif name.endswith("_bias"):
        i = i / 1024
    else:
        i = i / 512
    return i.float()


def int4(module, shape):
    code = draw(module + ".weight_packed", shape) & 15
    scale = ((draw(module + ".weight_scale", (shape[0], shape[1] // 32)) & 127) + 128).float() / 8192
    words = pack_to_int32((code - 8).to(torch.int8), 4)
    ours = (code.view(shape[0], -1, 8).long() << (4 * torch.arange(8))).sum(-1)
    assert torch.equal(words.long() & 0xFFFFFFFF, ours), "another packing than compressed-tensors'"
    assert torch.equal(scale, scale.bfloat16().float())
    w = dequantise_int4(words, scale.bfloat16(), torch.tensor(shape))
    return w.bfloat16().float() if "kv_b_proj" in module else w


def fp8(module, shape):
    code = (draw(module + ".weight", shape) + 128).to(torch.uint8)
    code = torch.where((code & 127) == 127, code - 1, code)
    blocks = [(n + 127) // 128 for n in shape]
    scale = ((draw(module + ".weight_scale_inv", blocks) & 127) + 128).float() / 262144
    w = dequantise_fp8(code.view(torch.float8_e4m3fn), scale)
    dense_fused = (".mlp.gate_proj" in module or ".mlp.up_proj" in module) and shape[0] % 128 != 0
    return w.bfloat16().float() if "kv_b_proj" in module or dense_fused else w


def tensors(config, experts, others):
    model = deepseek.DeepseekV3ForCausalLM(config)
    out = {}

    def linear(name, shape, form):
        module = name.removesuffix(".weight")
        out[name] = {"bf16": lambda: plain(name, shape), "int4": lambda: int4(module, shape), "fp8": lambda: fp8(module, shape)}[form]()

    for name, p in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        shape = tuple(p.shape)
        if "inv_freq" in name or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if ".mlp.experts." in name:
            prefix = name[: name.index("experts.") + 8]
            for e in range(config.n_routed_experts):
                if name.endswith("gate_up_proj"):
                    for part in ("gate_proj", "up_proj"):
                        linear(f"{prefix}{e}.{part}.weight", (shape[1] // 2, shape[2]), experts)
                else:
                    linear(f"{prefix}{e}.down_proj.weight", shape[1:], experts)
        elif len(shape) == 2 and ".layers." in name and "mlp.gate.weight" not in name:
            linear(name, shape, others)
        else:
            out[name] = plain(name, shape)
    return out


def round_cache(model):
    """The normed latent, and the rotated rope key, as bf16 holds them."""
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda module, args, out: out.bfloat16().float())
    rotate = deepseek.apply_rotary_pos_emb_interleave

    def rounded(*args, **kwargs):
        q, k = rotate(*args, **kwargs)
        return q, k.bfloat16().float()

    deepseek.apply_rotary_pos_emb_interleave = rounded
    return rotate


def smallest_gap(model, ids):
    """How far apart the last expert chosen and the first one left out are, over all tokens and layers."""
    gaps = []

    def look(module, args, out):
        choice = torch.sigmoid(out[0]) + module.e_score_correction_bias
        chosen = torch.zeros_like(choice).scatter_(1, out[2], 1).bool()
        groups = chosen.view(len(choice), module.num_group, -1).any(-1, keepdim=True)
        left_out = choice.masked_fill(chosen, -9).view(len(choice), module.num_group, -1).masked_fill(~groups, -9)
        gaps.append((choice.masked_fill(~chosen, 9).min(-1).values - left_out.flatten(1).max(-1).values).min().item())

    hooks = [layer.mlp.gate.register_forward_hook(look) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return min(gaps)


def main():
    torch.set_num_threads(1)
    for key, (fields, experts, others) in MODELS.items():
        if sys.argv[2:] and key not in sys.argv[2:]:
            continue
        config = DeepseekV3Config(**fields)
        model = build(config, tensors(config, experts, others))
        with torch.no_grad():
            exact = model(input_ids=torch.tensor([IDS])).logits[0]
        rotate = round_cache(model)
        seen = []
        hook = model.model.layers[-1].mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out[2]))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([IDS])).logits[0]
        hook.remove()
        gap = smallest_gap(model, IDS)
        deepseek.apply_rotary_pos_emb_interleave = rotate
        assert 0 < (exact - logits).abs().max()
        chosen = seen[0].sort(-1).values.float()
        data = np.concatenate([logits.numpy().ravel(), chosen.numpy().ravel()]).astype("<f4")
        data.tofile(f"{sys.argv[1]}/tiny_{key}.f32")
        print(key, "std", logits.std().item(), "rounding moves", (exact - logits).abs().max().item(), "smallest gap", gap, flush=True)


if __name__ == "__main__":
    main()
