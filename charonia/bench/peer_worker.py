"""Runs an engine in a separate process, for peers.py, in the engine's own Python environment.

`run KIND MODEL THREADS LONGEST BATCH OPTION` loads the model and prints a line of JSON about it. It replies to each
line {"batch", "prompt", "new"} with {"first_s", "rest_s"}: the seconds until all sequences have their first token, and
the seconds from there until all sequences have all `new` tokens. LONGEST: tokens of the longest sequence. BATCH: the
largest batch.

`convert KIND SOURCE VARIANT FOLDER` converts a Hugging Face folder to the engine's own format, quantised as VARIANT.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, which contains Charonia's modules

import numpy as np

FIRST_TOKEN = 259  # after three special tokens and 256 bytes


def run_charonia(path, threads, longest, batch, option):
    from charonia import Engine, SamplingParams

    block = 64  # tokens
    engine = Engine.from_pretrained(
        str(path), threads=threads, session_len=longest, max_batch_size=batch, token_budget=512,
        cache_block_seq_len=block, cache_max_entry_count=max(-(-longest // block), batch * -(-160 // block)) + batch,
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(prompts, new):
        sampling = SamplingParams(max_tokens=new, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
        outputs = engine.generate(prompts, sampling)
        first = max(output.timings.first_token_ms for output in outputs) / 1e3
        return first, max(output.timings.total_ms for output in outputs) / 1e3 - first

    info = {"weight_mb_per_step": engine.info.weight_bytes_per_step / 1e6, "vocab": engine.info.vocab_size}
    return run, info


def run_transformers(path, threads, longest, batch, option):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def run(prompts, new):
        """A simple loop over the model, because generate() does additional work."""
        began = time.perf_counter()
        out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(new - 1):
            out = model(input_ids=tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        return first - began, time.perf_counter() - first

    return run, {}


def run_llama_cpp(path, threads, longest, batch_size, option):
    import llama_cpp

    llama_cpp.llama_backend_init()
    file = str(path / "model.gguf" if path.is_dir() else path)
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = max(longest, batch_size * 192)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = batch_size
    params.n_threads = params.n_threads_batch = threads
    if hasattr(params, "kv_unified"):
        params.kv_unified = True  # one cache for all sequences, so that one sequence may use all of it
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
    batch = llama_cpp.llama_batch_init(max(512, batch_size), 0, 1)

    def step(rows):
        """rows: (token, position, sequence, wanted). Returns the most likely next token of each wanted sequence."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if status := llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode: {status}")
        return {
            sequence: int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=(vocab,)).argmax())
            for i, (_, _, sequence, wanted) in enumerate(rows)
            if wanted
        }

    def run(prompts, new):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began = time.perf_counter()
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = {}
        for i in range(0, len(rows), 512):
            tokens |= step(rows[i : i + 512])
        first = time.perf_counter()
        for i in range(new - 1):
            tokens = step([(token, len(prompts[0]) + i, sequence, True) for sequence, token in tokens.items()])
        return first - began, time.perf_counter() - first

    return run, {"vocab": vocab}


def run_openvino(path, threads, longest, batch, option):
    import openvino as ov
    import openvino_genai

    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    if option:
        properties["INFERENCE_PRECISION_HINT"] = option
    pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **properties)

    def run(prompts, new):
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        metrics = pipeline.generate(inputs, config).perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, metrics.get_generate_duration().mean / 1e3 - first

    return run, {}


def run_ctranslate2(path, threads, longest, batch, option):
    import ctranslate2

    generator = ctranslate2.Generator(str(path), device="cpu", intra_threads=threads, inter_threads=1)
    words = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def run(prompts, new):
        began = time.perf_counter()
        arrived = {}  # the time of the first token, by sequence

        def note(step):
            arrived.setdefault(step.batch_id, time.perf_counter())
            return False

        generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts], max_batch_size=len(prompts), max_length=new,
            min_length=new, sampling_topk=1, beam_size=1, end_token=[], include_prompt_in_result=False, callback=note,
        )  # fmt: skip
        first = max(arrived.values())
        return first - began, time.perf_counter() - first

    return run, {"vocab": len(words)}


def convert_openvino(source, variant, folder):
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    if variant:
        groups = {"group_size": 128, "ratio": 1.0} if variant == "int4" else {}
        bits = int(variant.removeprefix("int"))
        config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=bits, sym=True, **groups))
    else:
        config = OVConfig(dtype="bf16")
    main_export(
        str(source), output=folder, task="text-generation-with-past", framework="pt", stateful=True, ov_config=config
    )


def convert_ctranslate2(source, variant, folder):
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source), low_cpu_mem_usage=True).convert(str(folder), quantization=variant, force=True)


def convert_llama_cpp(source, variant, folder):
    if variant == "mxfp4":
        return write_gpt_oss(source, folder / "model.gguf")
    if not variant:
        return write_gguf(source, folder / "model.gguf")
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{variant.upper()}")
    files = [str(place / "model.gguf").encode() for place in (source, folder)]
    if status := llama_cpp.llama_model_quantize(*files, params):
        raise SystemExit(f"llama_model_quantize: {status}")


def write_gguf(source, file):
    """Write a random bf16 model as GGUF with llama.cpp's converter, with a tokenizer of the same vocabulary size."""
    converter = next(Path(sys.prefix).glob("source/*/vendor/llama.cpp"))
    sys.path[:0] = [str(converter), str(converter / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config = ModelBase.load_hparams(source, False)
    architecture = get_model_class(get_model_architecture(config, ModelType.TEXT))

    architecture.no_mtp, architecture.mtp_only = True, False  # there are no layers for multi-token prediction
    architecture.set_vocab = lambda self: add_vocabulary(self.gguf_writer, config["vocab_size"])
    with torch.inference_mode():
        architecture(source, gguf.LlamaFileType.MOSTLY_BF16, file).write()


def add_vocabulary(writer, vocab):
    """Add SentencePiece's bytes and words to a GGUFWriter; the tests do this too."""
    import gguf

    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    words = [f"w{i}" for i in range(vocab - FIRST_TOKEN)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words])
    writer.add_token_scores([0.0] * vocab)
    types = gguf.TokenType
    special = [types.UNKNOWN, types.CONTROL, types.CONTROL]
    writer.add_token_types([*special, *[types.BYTE] * 256, *[types.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def read_tensors(source):
    """Yield the names and the elements of a model's tensors; bf16 as np.uint16."""
    types = {"BF16": np.uint16, "U8": np.uint8}
    data = np.memmap(source / "model.safetensors", np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        kind = np.dtype(types[entry["dtype"]])
        begin, end = entry["data_offsets"]
        elements = np.frombuffer(data, kind, (end - begin) // kind.itemsize, 8 + length + begin)
        yield name, elements.reshape(entry["shape"])


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gpt_oss(source, file):
    """Write a random model of GPT-OSS' architecture as GGUF. Its experts are in MXFP4, all else in bf16 or fp32."""
    import gguf

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "mlp.router": "ffn_gate_inp",
        "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    }  # fmt: skip
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(file), "gpt-oss")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    add_vocabulary(writer, config["vocab_size"])
    tensors = dict(read_tensors(source))
    count = config["num_local_experts"]
    for name, elements in tensors.items():
        stem, _, kind = name.rpartition(".")
        if name.endswith("sinks"):
            stem, kind = name, "weight"
        if stem in names:
            new, wide = f"{names[stem]}.{kind}", elements.ndim == 2
        elif ".experts." not in name:
            _, _, layer, part = stem.split(".", 3)
            new, wide = f"blk.{layer}.{names[part]}.{kind}", elements.ndim == 2 and "router" not in name
        elif ".experts.0." in name and kind in ("bias", "weight_packed"):
            _, _, layer, _, _, _, part = stem.split(".")
            of_all = [name.replace(".experts.0.", f".experts.{index}.") for index in range(count)]
            new = f"blk.{layer}.{names[part]}"
            if kind == "weight_packed":
                scales = [one.replace("_packed", "_scale") for one in of_all]
                blocks = [mx_blocks(tensors[one], tensors[scale]) for one, scale in zip(of_all, scales, strict=True)]
                writer.add_tensor(f"{new}.weight", np.stack(blocks), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                continue
            new, wide, elements = f"{new}.bias", False, np.stack([tensors[one] for one in of_all])
        else:
            continue
        if wide:
            bits = np.ascontiguousarray(elements).view(np.uint8)
            writer.add_tensor(new, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(new, (elements.astype(np.uint32) << 16).view(np.float32))
    close(writer)


def mx_blocks(packed, scales):
    """Return the rows of GGUF's MXFP4: a block of 32 columns is the scale, then 16 bytes with columns i and i + 16."""
    rows, groups = scales.shape
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, groups, 32)
    values = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], values], -1).reshape(rows, groups * 17)


def vocabulary_of(path):
    return json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def main():
    action, kind, path, *rest = sys.argv[1:]
    if action == "convert":
        globals()[f"convert_{kind}"](Path(path), rest[0], Path(rest[1]))
        return
    threads, longest, batch, option = int(rest[0]), int(rest[1]), int(rest[2]), rest[3]
    run, info = globals()[f"run_{kind}"](Path(path), threads, longest, batch, option)
    vocab = info.pop("vocab", 0) or vocabulary_of(Path(path))
    print(json.dumps(info), flush=True)
    generator = np.random.default_rng(0)
    for line in sys.stdin:  # prompts are random and never repeated, so no engine can use a prefix cache
        asked = json.loads(line)
        prompts = generator.integers(FIRST_TOKEN, vocab, (asked["batch"], asked["prompt"])).tolist()
        first, rest_s = run(prompts, asked["new"])
        print(json.dumps({"first_s": first, "rest_s": rest_s}), flush=True)


if __name__ == "__main__":
    main()
