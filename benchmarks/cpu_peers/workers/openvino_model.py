from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai
from common import arguments, config_of, option, say, say_imports, serve

path, threads, _, _ = arguments()
say_imports()
properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
if option():
    properties["INFERENCE_PRECISION_HINT"] = option()
pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **properties)
say()


def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
    ids = np.array(prompts, dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = new
    config.ignore_eos = True
    config.do_sample = False
    metrics = pipeline.generate(inputs, config).perf_metrics
    first = metrics.get_ttft().mean / 1e3
    return first, metrics.get_generate_duration().mean / 1e3 - first


serve(config_of(path)["vocab_size"], run)
