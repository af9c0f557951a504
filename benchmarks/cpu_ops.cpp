// What the CPU's GEMMs and its attention reach, against the machine's read bandwidth measured in the same run.
//
//     cmake -S . -B build -DCHARONIA_BENCHMARKS=ON ... && cmake --build build --target charonia_cpu_ops
//     charonia benchmark program build/charonia_cpu_ops [threads [gemm | attention | quantised [format]]]
//
// GEMMs: few rows: weights of about 0.9 GB in all (layers of 4096 x 1536), so that caches do not help; GB/s of
// weights read. Many rows: 512 rows of the same shape; GFLOP/s. Attention: one new token of a sequence of 32,768 in 4
// layers (32 heads of 128, 8 or 32 of them of k and v), and 512 rows of a prefill behind 3,584; KV as bf16 and as
// integers; GB/s of KV read, and the time against bf16's. Several rounds of each. Quantised: GEMMs of the same shape
// with weights of 0.3 GB, in turns with those of bf16, by the time that a fifth of the GEMMs stay below: elapsed time,
// from 64 rows on processor time for each of the threads (say how many).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "ops/cpu/bandwidth.h"
#include "ops/cpu/make_cpu_ops.h"
#include "record.h"

using namespace charonia;

namespace {

constexpr std::int64_t kN = 4096, kK = 1536;
constexpr std::int64_t kTotalBytes = 900'000'000;

std::vector<double> seconds_of(int rounds, const std::function<void()>& run) {
  std::vector<double> times;
  run();
  for (int i = 0; i < rounds; ++i) {
    const auto before = std::chrono::steady_clock::now();
    run();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count());
  }
  return times;
}

// What takes so long each: `work` a second, in units of `unit`.
std::vector<double> rates_of(const std::vector<double>& seconds, double work, double unit) {
  std::vector<double> rates;
  for (const double one : seconds) rates.push_back(work / one / unit);
  return rates;
}

std::vector<double> times(std::vector<double> values, double factor) {
  for (auto& one : values) one *= factor;
  return values;
}

ops::Tensor tensor(const ops::Buffer& buffer, DType type, std::int64_t rows, std::int64_t cols) {
  return {buffer.data(), type, rows, cols, cols};
}

// One sequence in a cache of its own, all positions of which are filled.
class Sequence {
 public:
  static constexpr int kHeads = 32, kDim = 128, kBlockLen = 64, kLayers = 4, kChunk = 512;

  Sequence(ops::Ops& ops, int kv_heads, int quant_bits, int length)
      : ops_(ops),
        layout_{kLayers, kv_heads, kDim, kBlockLen, DType::bf16, quant_bits},
        columns_((kHeads + 2 * kv_heads) * kDim),
        cache_(ops.make_kv_cache(layout_, length / kBlockLen)),
        qkv_(ops.allocate(static_cast<std::size_t>(kChunk * columns_) * sizeof(float))),
        out_(ops.allocate(std::size_t{kChunk} * kHeads * kDim * sizeof(float))) {
    for (int b = 0; b < length / kBlockLen; ++b) table_.push_back(b);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> values(static_cast<std::size_t>(kChunk * columns_));
    for (auto& x : values) x = normal(random);
    ops.upload(qkv_->data(), values.data(), values.size() * sizeof(float));
    ops.prepare({.max_rows = kChunk, .max_sequences = 1, .max_positions = length}, [](const ops::StepShape&) {});
    for (int begin = 0; begin < length; begin += kChunk) step(begin, kChunk, true, false);
  }

  void step(int begin, int rows, bool store, bool attend) {
    std::vector<std::int32_t> positions, ids(static_cast<std::size_t>(rows)), starts = {0, rows};
    for (int i = 0; i < rows; ++i) positions.push_back(begin + i);
    const auto stride = static_cast<std::int64_t>(table_.size());
    ops_.begin_step({.ids = ids, .attention = {starts, positions, table_, stride}, .logits_rows = {}, .sample = {}});
    const auto qkv = tensor(*qkv_, DType::f32, rows, columns_);
    const auto out = tensor(*out_, DType::bf16, rows, std::int64_t{kHeads} * kDim);
    ops_.run_step([&](const ops::StepShape&) {
      for (int layer = 0; layer < kLayers; ++layer) {
        if (store) ops_.rotary_store(qkv, {}, *cache_, layer, kHeads);
        if (attend) ops_.attention(out, qkv, *cache_, layer, kHeads, {.scale = 0.088F});
      }
    });
    ops_.collect();
  }
  // Of all layers, for positions 0 .. length - 1.
  double bytes(int length) const { return static_cast<double>(ops_.kv_block_bytes(layout_)) * length / kBlockLen; }

 private:
  ops::Ops& ops_;
  ops::KvLayout layout_;
  std::int64_t columns_;
  std::unique_ptr<ops::KvCache> cache_;
  std::unique_ptr<ops::Buffer> qkv_, out_;
  std::vector<std::int32_t> table_;
};

void measure_attention(ops::Ops& ops, double limit) {
  constexpr int kLength = 32768, kPrefillFrom = 3584;
  for (const int kv_heads : {8, Sequence::kHeads}) {
    double plain = 0;
    for (const int bits : {0, 8, 4}) {
      Sequence sequence(ops, kv_heads, bits, kLength);
      const auto decode = seconds_of(15, [&] { sequence.step(kLength - 1, 1, false, true); });
      const auto prefill = seconds_of(5, [&] { sequence.step(kPrefillFrom, Sequence::kChunk, false, true); });
      if (bits == 0) plain = std::ranges::min(decode);
      const double bytes = sequence.bytes(kLength);
      const bench::Case of{"cpu_attention", {{"kv heads", kv_heads}, {"kv", bits == 0 ? "bf16" : cat(bits, " bits")}}};
      bench::print_figure(of, "read", "MB", {bytes / 1e6});
      bench::print_figure(of, "decode", "ms", times(decode, 1e3));
      bench::print_figure(of, "decode", "GB/s", rates_of(decode, bytes, 1e9));
      bench::print_figure(of, "of the bandwidth", "%", rates_of(decode, bytes, 1e7 * limit));
      bench::print_figure(of, "512 rows of prefill", "ms", times(prefill, 1e3));
      bench::print_figure(of, "the fastest decode, of bf16's", "times", {plain / std::ranges::min(decode)});
    }
  }
}

// Codes at random in one format, without zeros' worth of meaning.
class RandomSource : public ops::QuantSource {
 public:
  explicit RandomSource(const ops::QuantFormat& format) {
    rows_ = kN, cols_ = kK;
    format_ = format;
    std::mt19937 random(1);
    codes_.resize(static_cast<std::size_t>(kN * kK));
    for (auto& code : codes_) {
      do {
        code = static_cast<std::uint8_t>(random() & ((1U << bits_of(format.code)) - 1));
      } while (std::isnan(number_of(format.code, code)));
    }
  }
  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales, std::int8_t* zeros) const override {
    std::copy_n(codes_.begin() + static_cast<std::ptrdiff_t>(first * kK), n * kK, codes);
    std::fill_n(scales, n * groups(), 0.0078125F);
    if (format_.zeros) std::fill_n(zeros, n * groups(), std::int8_t{7});
  }
  std::string name() const override { return "random"; }

 private:
  std::vector<std::uint8_t> codes_;
};

// So many layers of a weight, and how long the GEMMs with them took, each by itself.
struct Layers {
  std::vector<std::unique_ptr<ops::Linear>> weights;
  std::vector<double> seconds;

  double bytes() const { return static_cast<double>(weights[0]->bytes()); }
  // Adds the times of a pass over the first `used` layers. Processor time of both threads is time in which they worked,
  // whatever else the machine does; but few rows wait for memory, which is nobody's work.
  void measure(ops::Ops& ops, std::int64_t used, std::int64_t rows, const ops::Buffer& in, const ops::Buffer& out,
               bool processor_time, int threads) {
    for (std::int64_t i = 0; i < used; ++i) {
      const auto before = std::chrono::steady_clock::now();
      const auto clock = std::clock();
      ops.linear(tensor(out, DType::f32, rows, kN), tensor(in, DType::bf16, rows, kK),
                 *weights[static_cast<std::size_t>(i)]);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - before;
      const double worked = static_cast<double>(std::clock() - clock) / CLOCKS_PER_SEC / threads;
      seconds.push_back(processor_time ? worked : elapsed.count());
    }
  }
  // A fifth of them took less: on a machine with other load a GEMM that nothing interrupted.
  double quick() {
    const auto fifth = seconds.begin() + std::ssize(seconds) / 5;
    std::ranges::nth_element(seconds, fifth);
    return *fifth;
  }
};

void measure_quantised(ops::Ops& ops, int threads, std::string_view only) {
  using ops::Code;
  constexpr std::int64_t kBytes = 300'000'000;
  const std::vector<float> values(static_cast<std::size_t>(kN * kK), 0.01F);
  const ops::HostMatrix source{values.data(), DType::f32, kN, kK};
  Layers dense;
  for (std::int64_t i = 0; i < kBytes / (kN * kK * 2); ++i) {
    dense.weights.push_back(ops.make_linear({&source, 1}, {}, DType::bf16));
  }
  const std::pair<std::string_view, ops::QuantFormat> formats[] = {
      {"int4", {Code::u4, 128, false, DType::f16}},
      {"int4 with zeros", {Code::u4, 128, true, DType::f16}},
      {"int4 in groups of 32", {Code::u4, 32, false, DType::f16}},
      {"mxfp4", {Code::f4_e2m1, 32, false, DType::f8_e8m0}},
      {"int8", {Code::i8, kK, false, DType::f32}},
      {"w8a8", {Code::i8, kK, false, DType::f32, ops::Activations::i8_token}},
      {"fp8", {Code::f8_e4m3, 128, false, DType::f32}}};
  for (const auto& [name, format] : formats) {
    if (!only.empty() && only != name) continue;
    const RandomSource random(format);
    const ops::QuantSource* const part = &random;
    Layers quantised;
    do {
      quantised.weights.push_back(ops.make_quantised_linear({&part, 1}, {}, DType::bf16));
    } while (quantised.bytes() * static_cast<double>(quantised.weights.size()) < kBytes);
    for (const std::int64_t rows : {1, 2, 4, 8, 16, 64, 512}) {
      const auto in = ops.allocate(static_cast<std::size_t>(rows * kK) * 2);
      const auto out = ops.allocate(static_cast<std::size_t>(rows * kN) * 4);
      const std::vector<std::uint16_t> ones(static_cast<std::size_t>(rows * kK), float_to_bf16(1));
      ops.upload(in->data(), ones.data(), ones.size() * 2);
      const bool many = rows >= 64;
      dense.seconds.clear(), quantised.seconds.clear();
      for (int turn = 0; turn < 4; ++turn) {
        for (Layers* const one : {&dense, &quantised}) {
          one->measure(ops, many ? 4 : std::ssize(one->weights), rows, *in, *out, many, threads);
        }
      }
      const double seconds = quantised.quick(), of_dense = dense.quick();
      const bench::Case of{"cpu_quantised_gemm", {{"format", name}, {"rows", rows}}};
      bench::print_figure(of, "weights", "GB/s", {quantised.bytes() / seconds / 1e9});
      bench::print_figure(of, "bf16's weights", "GB/s", {dense.bytes() / of_dense / 1e9});
      bench::print_figure(of, "of bf16's rate", "%", {100 * quantised.bytes() / seconds / (dense.bytes() / of_dense)});
      bench::print_figure(of, "arithmetic", "GFLOP/s", {2.0 * static_cast<double>(rows * kN * kK) / seconds / 1e9});
      bench::print_figure(of, "as fast as bf16", "times", {of_dense / seconds});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string_view what = argc > 2 ? argv[2] : "";
  const double limit = ops::cpu::measure_read_bandwidth(std::size_t{2} << 30, threads);
  const auto ops = ops::make_cpu_ops(threads);
  const auto isa = ops->instruction_set();
  bench::print_figure({"cpu_limits", {{"instruction set", isa}}}, "read bandwidth", "GB/s", {limit});
  if (what == "quantised") {
    measure_quantised(*ops, std::max(1, threads), argc > 3 ? argv[3] : "");
    return 0;
  }
  if (what != "gemm") measure_attention(*ops, limit);
  if (what == "attention") return 0;

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(static_cast<std::size_t>(kN * kK));
  for (auto& x : values) x = normal(random);
  const ops::HostMatrix source{values.data(), DType::f32, kN, kK};

  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    const auto layers = kTotalBytes / (kN * kK * static_cast<std::int64_t>(size_of(type)));
    std::vector<std::unique_ptr<ops::Linear>> weights;
    for (std::int64_t i = 0; i < layers; ++i) weights.push_back(ops->make_linear({&source, 1}, {}, type));
    const auto activation = ops->precision(type).activation;
    for (const std::int64_t rows : {1, 2, 4, 6, 8, 12, 16, 32, 512}) {
      const auto in = ops->allocate(static_cast<std::size_t>(rows * kK) * sizeof(float));
      const auto out = ops->allocate(static_cast<std::size_t>(rows * kN) * sizeof(float));
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * kK));
      std::transform(values.begin(), values.begin() + rows * kK, bits.begin(), float_to_bf16);
      ops->upload(in->data(), activation == DType::bf16 ? static_cast<const void*>(bits.data()) : values.data(),
                  static_cast<std::size_t>(rows * kK) * size_of(activation));
      const auto used = rows == 512 ? std::min<std::int64_t>(layers, 4) : layers;
      const auto seconds = seconds_of(rows == 512 ? 5 : 15, [&] {
        for (std::int64_t i = 0; i < used; ++i) {
          ops->linear(tensor(*out, DType::f32, rows, kN), tensor(*in, activation, rows, kK),
                      *weights[static_cast<std::size_t>(i)]);
        }
      });
      const double bytes = static_cast<double>(used) * static_cast<double>(weights[0]->bytes());
      const double flops = 2.0 * static_cast<double>(used * rows * kN * kK);
      const bench::Case of{"cpu_gemm", {{"type", to_string(type)}, {"rows", rows}}};
      bench::print_figure(of, "weights", "GB/s", rates_of(seconds, bytes, 1e9));
      bench::print_figure(of, "of the bandwidth", "%", rates_of(seconds, bytes, 1e7 * limit));
      bench::print_figure(of, "arithmetic", "GFLOP/s", rates_of(seconds, flops, 1e9));
    }
  }
  return 0;
}
