// Attention over blocks of the KV cache, as it is for one layer: decodes of many sequences, and chunks of prompts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/text.h"
#include "cuda_bench.h"
#include "ops/cuda/kernels/attention.h"

namespace charonia::bench {
namespace {

using cuda::AttentionItem;
using cuda::CacheLayer;
using cuda::DeviceMemory;

constexpr int kBlockLen = 64;

struct Load {
  std::int64_t batch, new_tokens, context;  // of every sequence: positions [context - new_tokens, context) are new
};

// Bytes of one block of a cache: random numbers, and sound scales where it is quantised.
std::vector<std::byte> block_pattern(Bench& bench, const CacheLayer& layer) {
  std::vector<std::byte> out(static_cast<std::size_t>(layer.block_bytes()));
  std::normal_distribution<float> normal(0, 1);
  const auto put = [&](std::size_t at, std::uint16_t bits) { std::memcpy(out.data() + at, &bits, sizeof bits); };
  if (layer.quant_bits == 0) {
    if (layer.dtype == DType::f32) {
      for (std::size_t at = 0; at < out.size(); at += sizeof(float)) {
        const float x = normal(bench.random);
        std::memcpy(out.data() + at, &x, sizeof x);
      }
    } else {
      for (std::size_t at = 0; at < out.size(); at += 2) put(at, float_to_bf16(normal(bench.random)));
    }
    return out;
  }
  for (auto& one : out) one = static_cast<std::byte>(bench.random() % 256);
  for (int row = 0; row < 2 * layer.half_rows(); ++row) {
    const auto at = static_cast<std::size_t>(layer.scale_at(0, row));
    put(at, float_to_f16(layer.quant_bits == 8 ? 0.02F : 0.35F));
    put(at + 2, float_to_f16(-2.6F));
  }
  return out;
}

// The numbers of one token's k and v of all kv heads.
double token_bytes(const CacheLayer& layer) {
  return static_cast<double>(layer.block_bytes()) / static_cast<double>(layer.block_len);
}

void measure_one(Bench& bench, const ModelShape& model, const Load& load, int quant_bits, DType type,
                 const std::string& kernel) {
  cuda::AttentionShape shape{.heads = static_cast<int>(model.heads),
                             .kv_heads = static_cast<int>(model.kv_heads),
                             .head_dim = static_cast<int>(model.head_dim),
                             .block_len = kBlockLen,
                             .sms = bench.device.sms};
  CacheLayer layer{nullptr, type, shape.kv_heads, shape.head_dim, kBlockLen, quant_bits};
  const auto rows = load.batch * load.new_tokens;
  const auto blocks_each = cuda::divide_up(load.context, kBlockLen), blocks = load.batch * blocks_each;
  const auto layer_bytes = static_cast<std::size_t>(blocks * layer.block_bytes());
  const int layers = bench.copies(layer_bytes);
  // Of the rows of one sequence: positions that they see in all.
  const double seen = static_cast<double>(load.new_tokens) *
                      (static_cast<double>(load.context) - static_cast<double>(load.new_tokens - 1) / 2);
  const auto element = static_cast<double>(size_of(type));
  const auto width = model.heads * model.head_dim;
  const Case what{.kernel = kernel,
                  .shape = {{"model", model.name},
                            {"batch", load.batch},
                            {"new_tokens", load.new_tokens},
                            {"context", load.context},
                            {"heads", model.heads},
                            {"kv_heads", model.kv_heads},
                            {"head_dim", model.head_dim},
                            {"kv_bits", quant_bits == 0 ? 8 * size_of(type) : quant_bits}},
                  .variant = quant_bits == 0 ? std::string(to_string(type)) : cat("int", quant_bits),
                  .bytes = static_cast<double>(load.batch * load.context) * token_bytes(layer) +
                           2 * element * static_cast<double>(rows * width),
                  .operations = type == DType::f32 ? 0 : 4.0 * static_cast<double>(load.batch * width) * seen};
  if (const auto needed = static_cast<std::size_t>(layers) * layer_bytes; !bench.fits(needed)) {
    return bench.skip(what, cat(needed, " bytes of k and v do not fit"));
  }
  const auto pattern = block_pattern(bench, layer);
  const auto cache = bench.repeated(pattern.data(), pattern.size(), static_cast<std::size_t>(layers) * layer_bytes);

  // Blocks lie anywhere, as in a cache that has been used.
  std::vector<std::int32_t> tables(static_cast<std::size_t>(blocks));
  std::iota(tables.begin(), tables.end(), 0);
  std::ranges::shuffle(tables, bench.random);
  std::vector<std::int32_t> starts{0}, begins, positions;
  for (std::int64_t s = 0; s < load.batch; ++s) {
    begins.push_back(static_cast<std::int32_t>(s * blocks_each));
    for (auto p = load.context - load.new_tokens; p < load.context; ++p) {
      positions.push_back(static_cast<std::int32_t>(p));
    }
    starts.push_back(static_cast<std::int32_t>(positions.size()));
  }
  cuda::AttentionPlan plan;
  cuda::plan_attention(shape, {starts, positions, {}, 0}, begins, plan);
  const auto bounds = cuda::attention_bounds(shape, static_cast<int>(rows), static_cast<int>(load.batch),
                                             static_cast<int>(load.context));
  const std::vector<std::int32_t> counts{static_cast<std::int32_t>(plan.decode.size()),
                                         static_cast<std::int32_t>(plan.prefill.size())};
  const auto max_decode = static_cast<std::int64_t>(plan.decode.size());
  const auto max_prefill = static_cast<std::int64_t>(plan.prefill.size());
  if (plan.decode.empty()) plan.decode.emplace_back();  // memory of no bytes cannot be made
  if (plan.prefill.empty()) plan.prefill.emplace_back();
  const auto columns = (model.heads + 2 * model.kv_heads) * model.head_dim;
  const auto qkv = bench.random_values(type, rows * columns);
  const DeviceMemory out(static_cast<std::size_t>(rows * width) * size_of(type));
  const DeviceMemory workspace(cuda::attention_workspace_bytes(shape, bounds));
  const auto decode = bench.uploaded(plan.decode), prefill = bench.uploaded(plan.prefill);
  const auto counts_there = bench.uploaded(counts), tables_there = bench.uploaded(tables);
  const cuda::AttentionWork work{.decode = decode.as<AttentionItem>(),
                                 .prefill = prefill.as<AttentionItem>(),
                                 .counts = counts_there.as<std::int32_t>(),
                                 .max_decode = max_decode,
                                 .max_prefill = max_prefill,
                                 .block_tables = tables_there.as<std::int32_t>(),
                                 .workspace = workspace.data(),
                                 .max_partials = bounds.partials};
  const ops::AttentionParams how{.scale = 1 / std::sqrt(static_cast<float>(model.head_dim))};
  bench.measure(what, [&](int index) {
    layer.data = cache.as<std::byte>() + static_cast<std::size_t>(index % layers) * layer_bytes;
    cuda::attention(bench.stream, bench.device, {out.data(), type, rows, width, width},
                    {qkv.data(), type, rows, columns, columns}, layer, shape, how, work);
  });
}

}  // namespace

void measure_decode_attention(Bench& bench) {
  std::vector<std::int64_t> batches{1, 4, 16, 64}, contexts{1024, 4096, 16384, 32768};
  if (bench.size == Size::quick) batches = {1, 64}, contexts = {1024, 32768};
  if (bench.size == Size::tiny) batches = {1, 2}, contexts = {70, 600};
  for (const auto& model : model_shapes(bench.size)) {
    for (const int bits : {0, 8, 4}) {
      for (const auto batch : batches) {
        for (const auto context : contexts) {
          measure_one(bench, model, {batch, 1, context}, bits, DType::bf16, "attention_decode");
        }
      }
    }
    measure_one(bench, model, {1, 1, contexts.front()}, 0, DType::f32, "attention_plain");
  }
}

void measure_prefill_attention(Bench& bench) {
  // Prompts of all lengths in a step of 2048 to 8192 tokens, and a chunk behind a long context.
  std::vector<Load> loads{{1, 512, 512},   {4, 512, 512},   {1, 2048, 2048}, {8, 1024, 1024},
                          {1, 8192, 8192}, {1, 2048, 8192}, {1, 2048, 32768}};
  if (bench.size == Size::quick) loads = {{4, 512, 512}, {1, 2048, 2048}, {1, 2048, 8192}};
  if (bench.size == Size::tiny) loads = {{2, 70, 70}, {1, 40, 200}};
  for (const auto& model : model_shapes(bench.size)) {
    for (const auto& load : loads) {
      for (const int bits : {0, 8, 4}) {
        if (bits != 0 && load.context != loads.back().context) continue;
        measure_one(bench, model, load, bits, DType::bf16, "attention_prefill");
      }
    }
  }
}

}  // namespace charonia::bench
