#!/usr/bin/env python3
"""Makes tests/fixtures/dequant.bin: random blocks of each GGUF type and what ggml's own Python package says they mean.

    python3 -m venv v && v/bin/pip install gguf
    v/bin/python tests/oracle/make_dequant.py tests/fixtures/dequant.bin

For each of Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, F16, BF16: u32 ggml type, u32 n values, u32 n bytes, the bytes, the values as f32.
"""
import struct
import sys

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

rng = np.random.default_rng(20261130)
# Byte offsets of the f16 scales in a block: these get plain values, everything else is random bits.
SCALES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q6_K: [208]}

with open(sys.argv[1], "wb") as f:
    for t in (T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K, T.F16, T.BF16):
        if t in SCALES:
            values, size = GGML_QUANT_SIZES[t]
            blocks = 512 // values
            raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
            for at in SCALES[t]:
                raw[:, at : at + 2] = (rng.standard_normal(blocks) * 0.02).astype("<f2").view(np.uint8).reshape(blocks, 2)
            out = quants.dequantize(raw.reshape(1, -1), t).reshape(-1)
        else:
            half = rng.integers(0, 65536, 512, dtype=np.uint16)
            nan = (half & 0x7C00) == 0x7C00 if t == T.F16 else (half & 0x7F80) == 0x7F80
            half[nan] = 0x8001  # a subnormal in both
            raw = half.view(np.uint8)
            out = half.view(np.float16).astype(np.float32) if t == T.F16 else (half.astype(np.uint32) << 16).view(np.float32)
        raw, out = raw.tobytes(), out.astype("<f4")
        f.write(struct.pack("<III", int(t), out.size, len(raw)) + raw + out.tobytes())
