#include "ops/cuda/prompt_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {
namespace {

using Chunk = PromptKernels::Chunk;

// Measured steps: rows of each chunk, and positions before it in some chunks of a step, or after many positions.
constexpr int kMeasuredRows[] = {PromptKernels::kMinRows, 256, 1024};
constexpr int kMeasuredBefore = 1024, kMeasuredMany = 8192;
constexpr int kRowsOfStep = 256;  // at least, if chunks are shorter

constexpr int kCheckedWindow = 1100;  // at most, so that windows begin within the longest checked sequence
constexpr int kCheckedSms = 4;        // so that a thread block takes several items

// Ends before, at and after ends of blocks and tiles, and is long enough for splits, also of kCheckedWindow positions.
constexpr Chunk kChecked[] = {{0, 130}, {62, 66}, {77, 64}, {1300, 40}};

std::string name_of(const ops::AttentionParams& how) {
  const auto name = cat(how.window > 0 ? cat(", window ", how.window) : "", how.soft_cap != 0 ? ", cap" : "",
                        how.alibi != nullptr ? ", slopes" : "", how.sinks != nullptr ? ", sinks" : "",
                        how.v_scales != nullptr ? ", scales" : "");
  return name.empty() ? "plain" : name.substr(2);
}

// Has everything that a measurement depends on, except the chunks of the step.
std::string name_of(const PromptLayers& layers) {
  const auto& shape = layers.shape;
  const int bits = layers.cache.quant_bits;
  std::string scores;
  for (const auto& how : layers.scores) scores += cat(scores.empty() ? ", " : " and ", name_of(how));
  return cat("attention of prompts, ", shape.heads, " heads over ", shape.kv_heads, " of ", shape.head_dim, ", ",
             to_string(layers.cache.dtype),
             bits == ops::kKvFp8 ? " in FP8" : bits != 0 ? cat(" in ", bits, " bits") : "", ", blocks of ", shape.block_len,
             scores);
}

// Chunks of this number of rows: as many as fill a step, at the beginning of prompts and within them, or one after many
// positions. Empty if sequences are too short.
std::vector<Chunk> step_of(int rows, bool after_many, int max_positions) {
  const int most = max_positions - rows;
  if (after_many) {
    return most < PromptKernels::kManyPositions ? std::vector<Chunk>{}
                                                : std::vector<Chunk>{{std::min(kMeasuredMany, most), rows}};
  }
  std::vector<Chunk> step;
  for (int i = 0; most >= 0 && (i == 0 || i * rows < kRowsOfStep); ++i) {
    step.push_back({i % 2 == 0 ? 0 : std::min(kMeasuredBefore, most), rows});
  }
  return step;
}

std::string name_of(std::span<const Chunk> step) {
  return cat(", after ", step[0].before, step.size() > 1 ? cat(" and ", step[1].before) : "", " positions");
}

// A step of prompts with operands: elements of q and k are -1, 0 and 1, and elements of v are multiples of a quarter
// from -1 to 1. Slots of the cache that no row attends to are NaN. Scales of v are 1, 1/2 and 1/4.
class Problem {
 public:
  Problem(Stream& stream, const PromptLayers& layers, AttentionShape shape, std::span<const Chunk> prompts)
      : stream_(stream), shape_(shape), cache_(layers.cache) {
    std::vector<std::int32_t> tables, table_begin;
    int rows = 0, positions = 0;
    starts_.push_back(0);
    for (const auto& [before, count] : prompts) {
      table_begin.push_back(static_cast<std::int32_t>(tables.size()));
      for (int i = 0; i < divide_up(before + count, shape.block_len); ++i) {
        tables.push_back(static_cast<std::int32_t>(tables.size()));
      }
      for (int i = 0; i < count; ++i) positions_.push_back(before + i);
      starts_.push_back(rows += count);
      positions = std::max(positions, before + count);
    }
    const auto sequences = static_cast<int>(prompts.size());
    std::shuffle(tables.begin(), tables.end(), random_);
    num_blocks_ = std::ssize(tables);
    make_rows(rows);
    make_cache(prompts, tables, table_begin);
    for (const bool wgmma : {false, true}) {
      shape_.wgmma = wgmma;
      auto& items = items_[wgmma ? 1 : 0];
      plan_attention(shape_, {.query_start = starts_, .positions = positions_, .block_tables = {}}, table_begin,
                     items.plan);
      items.bounds = attention_bounds(shape_, rows, sequences, positions);
      items.counts = upload<std::int32_t>(std::vector<std::int32_t>{static_cast<std::int32_t>(items.plan.decode.size()),
                                           static_cast<std::int32_t>(items.plan.prefill.size())});
      if (wgmma && cache_.quant_bits != 0) make_wide(items.plan, tables);
      items.decode = upload<AttentionItem>(items.plan.decode);
      items.prefill = upload<AttentionItem>(items.plan.prefill);
      items.workspace = DeviceMemory(attention_workspace_bytes(shape_, items.bounds), kWhat);
    }
    tables_ = upload<std::int32_t>(tables);
    std::vector<float> scales;
    for (int h = 0; h < shape_.kv_heads; ++h) scales.push_back(1.0F / static_cast<float>(1 << h % 3));
    v_scales_ = upload(scales);
  }

  // The bytes of a problem, without the workspace and small arrays.
  static std::size_t bytes(const PromptLayers& layers, std::span<const Chunk> prompts) {
    const auto& shape = layers.shape;
    std::int64_t rows = 0, blocks = 0;
    for (const auto& one : prompts) {
      rows += one.rows;
      blocks += divide_up(one.before + one.rows, shape.block_len);
    }
    const auto wide = layers.cache.quant_bits != 0 ? dequantised(layers.cache, nullptr).block_bytes() : 0;
    return static_cast<std::size_t>(3 * rows * shape.heads * shape.head_dim * 2 +
                                    blocks * (layers.cache.block_bytes() + wide));
  }

  // Writes output 1 if wgmma, otherwise output 0. sms: which the launch may use.
  void issue(PromptKernels::Attention* attention, const DeviceInfo& device, ops::AttentionParams how, bool wgmma,
             int sms) {
    if (how.v_scales != nullptr) how.v_scales = v_scales_.as<float>();
    const auto& items = items_[wgmma ? 1 : 0];
    auto shape = shape_;
    shape.wgmma = wgmma;
    shape.sms = sms;
    const AttentionWork work{.decode = items.decode.as<AttentionItem>(),
                             .prefill = items.prefill.as<AttentionItem>(),
                             .counts = items.counts.as<std::int32_t>(),
                             .max_decode = std::ssize(items.plan.decode),
                             .max_prefill = std::ssize(items.plan.prefill),
                             .block_tables = tables_.as<std::int32_t>(),
                             .workspace = items.workspace.data(),
                             .max_partials = items.bounds.partials,
                             .num_blocks = num_blocks_,
                             .wide = wide_.data(),
                             .wide_at = items.plan.wide_at,
                             .wide_blocks = items.plan.wide_blocks};
    attention(stream_, device, outputs(wgmma ? 1 : 0), tensor(q_.data()), cache_, shape, how, work);
  }

  // Adds to *different the elements of output 1 that differ from those of output 0.
  unsigned different(float relative, float absolute) {
    const DeviceMemory counter(sizeof(unsigned), kWhat);
    count_different(stream_, outputs(1), outputs(0).data, relative, absolute, counter.as<unsigned>());
    unsigned out = 0;
    stream_.download(&out, counter.data(), sizeof out, kWhat);
    stream_.wait(kWhat);
    return out;
  }
  void clear() { stream_.fill_zero(out_.data(), 2 * out_bytes(), kWhat); }

 private:
  static constexpr std::string_view kWhat = "a check of attention";
  struct Items {
    AttentionPlan plan;
    AttentionBounds bounds;
    DeviceMemory decode, prefill, counts, workspace;
  };

  std::size_t out_bytes() const {
    return static_cast<std::size_t>(starts_.back()) * static_cast<std::size_t>(shape_.heads * shape_.head_dim) * 2;
  }
  Tensor tensor(void* data) const {
    const std::int64_t columns = std::int64_t{shape_.heads} * shape_.head_dim;
    return {data, cache_.dtype, starts_.back(), columns, columns};
  }
  Tensor outputs(int out) const { return tensor(out_.as<std::byte>() + static_cast<std::size_t>(out) * out_bytes()); }

  template <class T>
  DeviceMemory upload(const std::vector<T>& from) {
    DeviceMemory to(std::max<std::size_t>(1, from.size()) * sizeof(T), kWhat);
    if (!from.empty()) stream_.upload(to.data(), from.data(), from.size() * sizeof(T), kWhat);
    return to;
  }

  std::uint16_t bits_of(float x) const { return cache_.dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x); }
  // A number from 0 to n - 1.
  unsigned next(unsigned n) { return static_cast<unsigned>(random_() >> 16) % n; }

  void make_rows(int rows) {
    const std::uint16_t numbers[] = {bits_of(-1), bits_of(0), bits_of(1)};
    const auto columns = static_cast<std::size_t>(shape_.heads * shape_.head_dim);
    std::vector<std::uint16_t> q(static_cast<std::size_t>(rows) * columns);
    for (auto& x : q) x = numbers[next(3)];
    q_ = upload(q);
    out_ = DeviceMemory(2 * out_bytes(), kWhat);
  }

  void make_cache(std::span<const Chunk> prompts, const std::vector<std::int32_t>& tables,
                  const std::vector<std::int32_t>& begin) {
    std::vector<std::byte> memory(static_cast<std::size_t>(num_blocks_ * cache_.block_bytes()), std::byte{0xff});
    for (std::size_t s = 0; s < prompts.size(); ++s) {
      for (int position = 0; position < prompts[s].before + prompts[s].rows; ++position) {
        const auto block = tables[static_cast<std::size_t>(begin[s] + position / shape_.block_len)];
        for (int head = 0; head < 2 * shape_.kv_heads; ++head) {
          write_head(memory.data(), block, head, position % shape_.block_len);
        }
      }
    }
    keys_ = upload(memory);
    cache_.data = keys_.data();
  }

  // v heads follow k heads.
  void write_head(std::byte* memory, std::int64_t block, int head, int slot) {
    const bool of_v = head >= shape_.kv_heads;
    const float scale = of_v ? 0.25F : 1.0F;
    const unsigned numbers = of_v ? 9 : 3;
    if (cache_.quant_bits == 0) {
      std::uint16_t all[9];
      for (unsigned i = 0; i < numbers; ++i) all[i] = bits_of(scale * static_cast<float>(i) - 1);
      auto* const to = reinterpret_cast<std::uint16_t*>(memory) + cache_.k_at(block, head, slot);
      for (int d = 0; d < shape_.head_dim; ++d) to[d] = all[next(numbers)];
      return;
    }
    const int row = head * shape_.block_len + slot;
    auto* const to = memory + cache_.integers_at(block, row);
    if (!ops::kv_holds_integers(cache_.quant_bits)) {
      for (int d = 0; d < cache_.row_bytes(); ++d) {
        to[d] = static_cast<std::byte>(float_to_e4m3(scale * static_cast<float>(next(numbers)) - 1));
      }
      return;
    }
    for (int d = 0; d < cache_.row_bytes(); ++d) {
      to[d] = static_cast<std::byte>(next(numbers) + (cache_.quant_bits == 4 ? 16 * next(numbers) : 0));
    }
    const std::uint16_t both[] = {float_to_f16(scale), float_to_f16(-1)};
    std::memcpy(memory + cache_.scale_at(block, row), both, sizeof both);
  }

  void make_wide(AttentionPlan& plan, std::vector<std::int32_t>& tables) {
    widen_plan(shape_, std::numeric_limits<std::int64_t>::max(), plan, tables);
    const auto block = dequantised(cache_, nullptr).block_bytes();
    wide_ = DeviceMemory(static_cast<std::size_t>(plan.wide_blocks * block), kWhat);
  }

  Stream& stream_;
  AttentionShape shape_;
  CacheLayer cache_;
  std::mt19937 random_;
  std::vector<std::int32_t> starts_, positions_;
  std::int64_t num_blocks_ = 0;
  DeviceMemory q_, out_, keys_, tables_, v_scales_, wide_;
  Items items_[2];
};

}  // namespace

void add_scores(PromptLayers& layers, const ops::AttentionParams& how) {
  const auto same = [&](const ops::AttentionParams& other) {
    return (other.window > 0) == (how.window > 0) && (other.soft_cap != 0) == (how.soft_cap != 0) &&
           (other.alibi != nullptr) == (how.alibi != nullptr) && (other.sinks != nullptr) == (how.sinks != nullptr) &&
           (other.v_scales != nullptr) == (how.v_scales != nullptr);
  };
  if (std::ranges::none_of(layers.scores, same)) layers.scores.push_back(how);
}

namespace {

// Scores are multiples of the logarithm of 2, so probabilities are powers of 2, which 16 bits represent exactly. Then
// the results of right kernels differ only in the last bit. A cap or slopes make other numbers of them: each kernel
// rounds a probability relative to the largest one so far, and elements of v are at most 1.
ops::AttentionParams exact_scores(ops::AttentionParams how) {
  how.scale = 0.693147181F;
  return how;
}
bool outputs_agree(Problem& problem, const PromptLayers& layers, const ops::AttentionParams& how) {
  const float roundoff = layers.cache.dtype == DType::f16 ? 0x1p-11F : 0x1p-8F;
  const bool exact = how.soft_cap == 0 && how.alibi == nullptr;
  return problem.different(4 * roundoff, (exact ? 0.5F : 4.0F) * roundoff) == 0;
}

}  // namespace

// The items are planned for the whole device, so some are divided, and are computed by few thread blocks.
bool PromptKernels::agrees(Stream& stream, const PromptLayers& layers, const ops::AttentionParams& how) const {
  auto checked = exact_scores(how);
  if (how.window > 0) checked.window = std::min(how.window, kCheckedWindow);
  auto shape = layers.shape;
  if (shape.window > 0) shape.window = checked.window;  // otherwise some layers of the plan have no window
  const int sms = std::min(shape.sms, kCheckedSms);
  Problem problem(stream, layers, shape, kChecked);
  problem.clear();
  problem.issue(attention_, device_, checked, false, sms);
  stream.wait("attention by the kernel for all devices");
  problem.issue(attention_, device_, checked, true, sms);
  return outputs_agree(problem, layers, how);
}

// Returns nothing if the last results of the kernels differ.
std::optional<KernelTimes> PromptKernels::measure(Stream& stream, const PromptLayers& layers,
                                                  std::span<const Chunk> step) const {
  Problem problem(stream, layers, layers.shape, step);
  double operations = 0;
  for (const auto& [before, rows] : step) {
    operations += 4.0 * layers.shape.heads * layers.shape.head_dim * rows * (before + rows / 2.0);
  }
  KernelTimes sum;
  for (const auto& how : layers.scores) {
    const auto measured = exact_scores(how);
    const auto time_of = [&](bool wgmma) {
      return choice_.timer()(stream, 5 + operations / 3e8, [&](int) {
        problem.issue(attention_, device_, measured, wgmma, layers.shape.sms);
      });
    };
    problem.clear();
    sum.tiles += time_of(false);
    sum.wgmma += time_of(true);
    if (!outputs_agree(problem, layers, how)) return std::nullopt;
  }
  return sum;
}

std::vector<PromptKernels::Choice> PromptKernels::choose(Stream& stream, const PromptLayers& layers, int max_rows,
                                                         int max_positions) {
  const auto name = name_of(layers);
  const std::string why_not(why_no_wgmma(device_, layers.shape, layers.cache));
  const auto for_all = [&] {
    const bool wgmma = choice_.choose(stream, {.name = name, .unsupported = why_not});
    return std::vector<Choice>{{kMinRows, false, wgmma}, {kMinRows, true, wgmma}};
  };
  if (asked_ || !why_not.empty()) return for_all();
  std::optional<bool> agree;  // compared once
  const auto compare = [&] {
    if (!agree) agree = std::ranges::all_of(layers.scores, [&](const auto& how) { return agrees(stream, layers, how); });
    return *agree;
  };
  std::vector<Choice> choices;
  std::vector<KernelChoice::Computation> sizes;
  for (const int rows : kMeasuredRows) {
    for (const bool after_many : {false, true}) {
      const auto step = step_of(rows, after_many, max_positions);
      if (rows > max_rows || step.empty() || Problem::bytes(layers, step) > kGemmOperandBytes) continue;
      choices.push_back({rows, after_many, false});
      sizes.push_back({.name = cat(name, name_of(step)), .rows = rows, .agrees = compare, .measure = [&, step] {
                         return measure(stream, layers, step);
                       }});
    }
  }
  if (choices.empty()) return for_all();
  const auto wgmma = choice_.choose_all(stream, sizes);
  for (std::size_t i = 0; i < choices.size(); ++i) choices[i].wgmma = wgmma[i];
  return choices;
}

void PromptKernels::prepare(Stream& stream, std::span<const PromptLayers> plans, int max_rows, int max_positions) {
  chosen_.assign(plans.size(), {});
  choice_.begin();
  if (!choice_.considers_wgmma()) return;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].scores.empty()) continue;  // of another kernel
    chosen_[i] = choose(stream, plans[i], max_rows, max_positions);
  }
  choice_.end();
}

bool PromptKernels::uses_wgmma(std::size_t plan, std::int64_t rows, std::int64_t before) const {
  bool wgmma = false;
  if (plan >= chosen_.size()) return wgmma;
  for (const auto& choice : chosen_[plan]) {
    if (choice.rows <= rows && choice.after_many == (before >= kManyPositions)) wgmma = choice.wgmma;
  }
  return wgmma;
}

bool PromptKernels::chosen(std::size_t plan) const {
  return plan < chosen_.size() && std::ranges::any_of(chosen_[plan], &Choice::wgmma);
}

}  // namespace charonia::cuda
