"""What make_kimi.py and make_kimi_tiny.py share: a checkpoint of the Kimi K2 graph in any of its published forms as
transformers' DeepseekV3ForCausalLM in float32."""
import glob
import json
import os

import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def dequantise_fp8(w, scale):
    """w = q * scale of its block of 128 x 128; blocks at the edges are cut off."""
    rows = scale.repeat_interleave(128, 0)[: w.shape[0]]
    return w.to(torch.float32) * rows.repeat_interleave(128, 1)[:, : w.shape[1]]


def dequantise_int4(packed, scale, shape):
    q = unpack_from_int32(packed, 4, torch.Size(shape.tolist()))
    return q.to(torch.float32) * scale.to(torch.float32).repeat_interleave(32, 1)


def plain_tensors(tensors):
    """Every tensor in float32, without the prefix of the wrapper, its scales multiplied in; pictures' tensors are dropped."""
    out = {}
    for name, t in tensors.items():
        name = name.removeprefix("language_model.")
        module, _, kind = name.rpartition(".")
        if name.startswith(("vision_tower.", "mm_projector.")) or kind in ("weight_scale_inv", "weight_scale", "weight_shape"):
            continue
        key = next(k for k in tensors if k.removeprefix("language_model.") == name).removesuffix(kind)
        if kind == "weight_packed":
            out[module + ".weight"] = dequantise_int4(t, tensors[key + "weight_scale"], tensors[key + "weight_shape"])
        elif t.dtype == torch.float8_e4m3fn:
            out[name] = dequantise_fp8(t, tensors[key + "weight_scale_inv"])
        else:
            out[name] = t.to(torch.float32)
    return out


def read_config(folder):
    config = json.load(open(os.path.join(folder, "config.json")))
    config = config.get("text_config", config)
    config.pop("quantization_config", None)
    config.pop("auto_map", None)
    config["model_type"] = "deepseek_v3"
    return DeepseekV3Config(**config)


def build(config, tensors):
    """The experts' matrices lie one after the other in transformers' own module."""
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).eval()
    state = dict(tensors)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        if prefix + "0.gate_proj.weight" not in state:
            continue
        take = lambda part: torch.stack([state.pop(f"{prefix}{e}.{part}.weight") for e in range(config.n_routed_experts)])
        state[prefix + "gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], 1)
        state[prefix + "down_proj"] = take("down_proj")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, extra = model.load_state_dict(state, strict=False)
    assert not extra and not [m for m in missing if "inv_freq" not in m], (missing, extra)
    return model.float()


def load(folder):
    tensors = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        tensors.update(load_file(path))
    return build(read_config(folder), plain_tensors(tensors))


def chosen_experts(model, ids):
    """Experts of the last layer that has some, [len(ids)][top k], and the logits."""
    seen = []
    gate = model.model.layers[-1].mlp.gate
    hook = gate.register_forward_hook(lambda module, args, out: seen.append(out[2]))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    hook.remove()
    return seen[0].sort(-1).values.tolist(), logits
