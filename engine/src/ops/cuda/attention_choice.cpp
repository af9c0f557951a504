#include "ops/cuda/attention_choice.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "base/dtype.h"
#include "base/text.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/gemm/gemm_operands.h"

namespace charonia::cuda {
namespace {

using Chunk = AttentionChoice::Chunk;

constexpr int kCheckedWindow = 1100;  // at most, so that windows begin within the longest checked sequence

std::string name_of(const ops::AttentionParams& how) {
  const auto name = cat(how.window > 0 ? cat(", window ", how.window) : "", how.soft_cap != 0 ? ", cap" : "",
                        how.alibi != nullptr ? ", slopes" : "", how.sinks != nullptr ? ", sinks" : "",
                        how.v_scales != nullptr ? ", scales" : "");
  return name.empty() ? "plain" : name.substr(2);
}

// Has everything that a measurement depends on, except the step.
std::string name_of(std::string_view of, const AttentionLayers& layers) {
  const auto& shape = layers.shape;
  const int bits = layers.cache.quant_bits;
  std::string scores;
  for (const auto& how : layers.scores) scores += cat(scores.empty() ? ", " : " and ", name_of(how));
  return cat("attention of ", of, ", ", shape.heads, " heads over ", shape.kv_heads, " of ", shape.head_dim, ", ",
             to_string(layers.cache.dtype),
             bits == ops::kKvFp8 ? " in FP8" : bits != 0 ? cat(" in ", bits, " bits") : "", ", blocks of ",
             shape.block_len, scores,
             shape.min_decode_split != AttentionShape{}.min_decode_split
                 ? cat(", splits of ", shape.min_decode_split, " or more")
                 : "");
}

// For a check: shorter windows.
AttentionLayers with_short_windows(AttentionLayers layers) {
  for (auto& how : layers.scores) how.window = std::min(how.window, kCheckedWindow);
  layers.shape.window = std::min(layers.shape.window, kCheckedWindow);
  return layers;
}

// A step with operands: elements of q and k are -1, 0 and 1, and elements of v are multiples of a quarter from -1 to 1.
// Slots of the cache that no row attends to are NaN. Scales of v are 1, 1/2 and 1/4. Heads of an integer cache have
// different scales and zeros, which represent these numbers exactly.
class Problem {
 public:
  // copies: of the cache (copies_of()).
  Problem(Stream& stream, const AttentionLayers& layers, bool AttentionShape::*selects, std::span<const Chunk> chunks,
          std::size_t copies = 1)
      : stream_(stream), shape_(layers.shape), cache_(layers.cache), selects_(selects), copies_(copies) {
    std::vector<std::int32_t> tables, table_begin;
    int rows = 0, positions = 0;
    starts_.push_back(0);
    for (const auto& [before, count] : chunks) {
      table_begin.push_back(static_cast<std::int32_t>(tables.size()));
      for (int i = 0; i < divide_up(before + count, shape_.block_len); ++i) {
        tables.push_back(static_cast<std::int32_t>(tables.size()));
      }
      for (int i = 0; i < count; ++i) positions_.push_back(before + i);
      starts_.push_back(rows += count);
      positions = std::max(positions, before + count);
    }
    const auto sequences = static_cast<int>(chunks.size());
    std::shuffle(tables.begin(), tables.end(), random_);
    num_blocks_ = std::ssize(tables);
    make_rows(rows);
    make_cache(chunks, tables, table_begin);
    for (const bool candidate : {false, true}) {
      shape_.*selects_ = candidate;
      auto& items = items_[candidate ? 1 : 0];
      plan_attention(shape_, {.query_start = starts_, .positions = positions_, .block_tables = {}}, table_begin,
                     items.plan);
      items.bounds = attention_bounds(shape_, rows, sequences, positions);
      items.counts = upload<std::int32_t>(std::vector<std::int32_t>{static_cast<std::int32_t>(items.plan.decode.size()),
                                           static_cast<std::int32_t>(items.plan.prefill.size())});
      if (shape_.wgmma && cache_.quant_bits != 0) make_wide(items.plan, tables);
      items.decode = upload<AttentionItem>(items.plan.decode);
      items.prefill = upload<AttentionItem>(items.plan.prefill);
      items.workspace = DeviceMemory(attention_workspace_bytes(shape_, items.bounds), kWhat);
    }
    tables_ = upload<std::int32_t>(tables);
    std::vector<float> scales;
    for (int h = 0; h < shape_.kv_heads; ++h) scales.push_back(1.0F / static_cast<float>(1 << h % 3));
    v_scales_ = upload(scales);
  }

  // The bytes of a problem, without the workspace and small arrays: of one copy of the cache, and of all else.
  struct Bytes {
    std::size_t cache, others;
  };
  static Bytes bytes(const AttentionLayers& layers, bool AttentionShape::*selects, std::span<const Chunk> chunks) {
    auto shape = layers.shape;
    shape.*selects = true;
    std::int64_t rows = 0, blocks = 0;
    for (const auto& one : chunks) {
      rows += one.rows;
      blocks += divide_up(one.before + one.rows, shape.block_len);
    }
    const bool widens = shape.wgmma && layers.cache.quant_bits != 0;
    const auto wide = widens ? dequantised(layers.cache, nullptr).block_bytes() : 0;
    return {static_cast<std::size_t>(blocks * layers.cache.block_bytes()),
            static_cast<std::size_t>(3 * rows * shape.heads * shape.head_dim * 2 + blocks * wide)};
  }

  // Writes output 1 if candidate, otherwise output 0. sms: which the launch may use. index: of equal launches.
  //
  // Scores are multiples of the logarithm of 2, so probabilities are powers of 2, which 16 bits represent exactly.
  void issue(AttentionChoice::Attention* attention, const DeviceInfo& device, ops::AttentionParams how, bool candidate,
             int sms, int index = 0) {
    how.scale = 0.693147181F;
    if (how.v_scales != nullptr) how.v_scales = v_scales_.as<float>();
    const auto& items = items_[candidate ? 1 : 0];
    auto shape = shape_;
    shape.*selects_ = candidate;
    shape.sms = sms;
    auto cache = cache_;
    cache.data = keys_.as<std::byte>() + static_cast<std::size_t>(index) % copies_ * (keys_.bytes() / copies_);
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
    attention(stream_, device, outputs(candidate ? 1 : 0), tensor(q_.data()), cache, shape, how, work);
  }

  void clear() { stream_.fill_zero(out_.data(), 2 * out_bytes(), kWhat); }

  // Whether both outputs are equal. The results of right kernels differ only in the last bit, because their
  // probabilities are exact (issue()). A cap or slopes make other numbers of them: each kernel rounds a probability
  // relative to the largest one so far, and elements of v are at most 1.
  bool outputs_agree(const ops::AttentionParams& how) {
    const float roundoff = cache_.dtype == DType::f16 ? 0x1p-11F : 0x1p-8F;
    const bool exact = how.soft_cap == 0 && how.alibi == nullptr;
    const DeviceMemory counter(sizeof(unsigned), kWhat);
    count_different(stream_, outputs(1), outputs(0).data, 4 * roundoff, (exact ? 0.5F : 4.0F) * roundoff,
                    counter.as<unsigned>());
    unsigned different = 0;
    stream_.download(&different, counter.data(), sizeof different, kWhat);
    stream_.wait(kWhat);
    return different == 0;
  }

 private:
  static constexpr std::string_view kWhat = "a check of attention";
  static constexpr unsigned kHeads = 1021;  // different heads of k, and of v
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

  void make_cache(std::span<const Chunk> chunks, const std::vector<std::int32_t>& tables,
                  const std::vector<std::int32_t>& begin) {
    std::vector<std::byte> heads[2];  // of k, of v
    for (auto& of : heads) {
      for (unsigned i = 0; i < kHeads; ++i) append_head(of, &of == heads ? 3 : 9);
    }
    std::vector<std::byte> memory(static_cast<std::size_t>(num_blocks_ * cache_.block_bytes()), std::byte{0xff});
    for (std::size_t s = 0; s < chunks.size(); ++s) {
      for (int position = 0; position < chunks[s].before + chunks[s].rows; ++position) {
        const auto block = tables[static_cast<std::size_t>(begin[s] + position / shape_.block_len)];
        for (int head = 0; head < 2 * shape_.kv_heads; ++head) {  // v heads follow k heads
          write_head(memory.data(), block, head, position % shape_.block_len, heads[head < shape_.kv_heads ? 0 : 1]);
        }
      }
    }
    keys_ = DeviceMemory(copies_ * memory.size(), kWhat);
    repeat(stream_, keys_.as<std::byte>(), memory, keys_.bytes());
  }

  // numbers: how many different ones there are, from -1 to 1.
  void append_head(std::vector<std::byte>& to, unsigned numbers) {
    const float scale = 2.0F / static_cast<float>(numbers - 1);
    const auto append = [&](const auto& x) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(&x);
      to.insert(to.end(), bytes, bytes + sizeof x);
    };
    if (cache_.quant_bits == 0) {
      for (int d = 0; d < shape_.head_dim; ++d) append(bits_of(scale * static_cast<float>(next(numbers)) - 1));
      return;
    }
    if (!ops::kv_holds_integers(cache_.quant_bits)) {
      for (int d = 0; d < shape_.head_dim; ++d) append(float_to_e4m3(scale * static_cast<float>(next(numbers)) - 1));
      return;
    }
    // The numbers are codes in equal steps from the first one on.
    const unsigned most = (1U << cache_.quant_bits) - 1, codes = numbers - 1;
    unsigned step = 1U << next(static_cast<unsigned>(cache_.quant_bits));
    while (codes * step > most) step /= 2;
    const unsigned first = next(most - codes * step + 1);
    const auto code = [&] { return first + step * next(numbers); };
    for (int d = 0; d < cache_.row_bytes(); ++d) {
      append(static_cast<std::uint8_t>(cache_.quant_bits == 4 ? code() + 16 * code() : code()));
    }
    const float by = scale / static_cast<float>(step);
    append(float_to_f16(by));
    append(float_to_f16(-1 - by * static_cast<float>(first)));
  }

  void write_head(std::byte* memory, std::int64_t block, int head, int slot, const std::vector<std::byte>& heads) {
    const auto size = heads.size() / kHeads;
    const auto* const from = heads.data() + next(kHeads) * size;
    if (cache_.quant_bits == 0) {
      std::memcpy(memory + 2 * cache_.k_at(block, head, slot), from, size);
      return;
    }
    const int row = head * shape_.block_len + slot;
    const auto codes = static_cast<std::size_t>(cache_.row_bytes());
    std::memcpy(memory + cache_.integers_at(block, row), from, codes);
    std::memcpy(memory + cache_.scale_at(block, row), from + codes, size - codes);
  }

  void make_wide(AttentionPlan& plan, std::vector<std::int32_t>& tables) {
    widen_plan(shape_, std::numeric_limits<std::int64_t>::max(), plan, tables);
    const auto block = dequantised(cache_, nullptr).block_bytes();
    wide_ = DeviceMemory(static_cast<std::size_t>(plan.wide_blocks * block), kWhat);
  }

  Stream& stream_;
  AttentionShape shape_;
  CacheLayer cache_;
  bool AttentionShape::*selects_;
  std::size_t copies_;
  std::mt19937 random_;
  std::vector<std::int32_t> starts_, positions_;
  std::int64_t num_blocks_ = 0;
  DeviceMemory q_, out_, keys_, tables_, v_scales_, wide_;
  Items items_[2];
};

}  // namespace

void add_scores(AttentionLayers& layers, const ops::AttentionParams& how) {
  const auto same = [&](const ops::AttentionParams& other) {
    return (other.window > 0) == (how.window > 0) && (other.soft_cap != 0) == (how.soft_cap != 0) &&
           (other.alibi != nullptr) == (how.alibi != nullptr) && (other.sinks != nullptr) == (how.sinks != nullptr) &&
           (other.v_scales != nullptr) == (how.v_scales != nullptr);
  };
  if (std::ranges::none_of(layers.scores, same)) layers.scores.push_back(how);
}

// sms: fewer than the plan is made for, if thread blocks shall take several items.
bool AttentionChoice::agree(Stream& stream, const AttentionLayers& layers, std::span<const Chunk> chunks,
                            int sms) const {
  Problem problem(stream, layers, kernels_.selects, chunks);
  return std::ranges::all_of(layers.scores, [&](const auto& how) {
    problem.clear();
    problem.issue(attention_, device_, how, false, sms);
    stream.wait("attention by the kernel for all devices");
    problem.issue(attention_, device_, how, true, sms);
    return problem.outputs_agree(how);
  });
}

// Returns nothing if the last results of the kernels differ.
std::optional<KernelTimes> AttentionChoice::measure(Stream& stream, const AttentionLayers& layers,
                                                    std::span<const Chunk> chunks) const {
  const auto bytes = Problem::bytes(layers, kernels_.selects, chunks);
  const auto copies = std::min((kGemmOperandBytes - bytes.others) / bytes.cache, copies_of(device_, bytes.cache));
  Problem problem(stream, layers, kernels_.selects, chunks, copies);
  double operations = 0;
  for (const auto& [before, rows] : chunks) {
    operations += 4.0 * layers.shape.heads * layers.shape.head_dim * rows * (before + rows / 2.0);
  }
  KernelTimes sum;
  for (const auto& how : layers.scores) {
    const auto time_of = [&](bool candidate) {
      return timer()(stream, 5 + operations / 3e8, [&](int index) {
        problem.issue(attention_, device_, how, candidate, layers.shape.sms, index);
      });
    };
    problem.clear();
    sum.usual += time_of(false);
    sum.candidate += time_of(true);
    if (!problem.outputs_agree(how)) return std::nullopt;
  }
  return sum;
}

void AttentionChoice::choose(Stream& stream, const AttentionLayers& layers, std::string_view unsupported,
                             std::vector<Step>& steps) {
  const auto name = name_of(kernels_.of, layers);
  const auto is_too_large = [&](const Step& step) {
    const auto bytes = Problem::bytes(layers, kernels_.selects, step.chunks);
    return bytes.cache + bytes.others > kGemmOperandBytes;
  };
  const bool compares = !asked_ && unsupported.empty();
  if (compares) std::erase_if(steps, is_too_large);
  if (!compares || steps.empty()) {
    const auto candidate = KernelChoice::choose(stream, {{.name = name,
                                                          .unsupported = std::string(unsupported),
                                                          .usual = kernels_.usual,
                                                          .candidate = kernels_.candidate}});
    for (auto& step : steps) step.candidate = candidate.front();
    return;
  }
  std::optional<bool> agrees;  // compared once
  Sizes sizes;
  for (const auto& step : steps) {
    const auto compare = [&] {
      if (!agrees) {
        const int sms = std::min(layers.shape.sms, kernels_.checked_sms);
        agrees = agree(stream, with_short_windows(layers), kernels_.checked, sms);
      }
      return *agrees && agree(stream, layers, step.chunks, layers.shape.sms);
    };
    sizes.push_back({.name = cat(name, ", ", step.name),
                     .rows = step.rows,
                     .agrees = compare,
                     .measure = [&] { return measure(stream, layers, step.chunks); },
                     .usual = kernels_.usual,
                     .candidate = kernels_.candidate});
  }
  const auto candidate = KernelChoice::choose(stream, sizes);
  for (std::size_t i = 0; i < steps.size(); ++i) steps[i].candidate = candidate[i];
}

}  // namespace charonia::cuda
