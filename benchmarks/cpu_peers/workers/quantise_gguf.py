"""quantise_gguf.py FILE TYPE FILE: what llama.cpp's quantiser makes of a GGUF file of bf16, as q8_0, q4_0 or q4_K_M."""

from __future__ import annotations

import sys

import llama_cpp

_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
source, wanted, target = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = _TYPES[wanted]
if status := llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
    raise SystemExit(f"llama_model_quantize: {status}")
