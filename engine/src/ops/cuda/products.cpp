#include "ops/cuda/products.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/product_memory.h"

namespace charonia::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// A number of rows goes the way of the next class. Where time grows in steps (tiles of 8 to 128 rows), classes end
// there.
constexpr std::array kClasses{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192};
using Class = std::size_t;

// The class of so many rows; of more than the last one's, the last.
Class class_of(std::int64_t rows) {
  const auto at = std::ranges::lower_bound(kClasses, rows);
  return std::min(static_cast<Class>(at - kClasses.begin()), kClasses.size() - 1);
}

// For the partial sums of our own ways; a way that needs more is not taken.
constexpr std::size_t kOwnWorkspaceBytes = std::size_t{16} << 20;
constexpr std::size_t kBlasWorkspaceBytes = std::size_t{32} << 20;  // what cuBLAS itself takes on compute capability 9

// Without measurements: as many rows go our own ways, which read the weight as fast as memory gives it.
constexpr std::int64_t kOwnRows = 32;

// Most that operands to measure with may take. Products of more rows are chosen by rule.
constexpr std::size_t kOperandBytes = std::size_t{2} << 30;

std::size_t matrix_bytes(DType type, std::int64_t rows, std::int64_t stride) {
  return static_cast<std::size_t>(round_up(rows * stride * static_cast<std::int64_t>(size_of(type)), 256));
}

// A guess in microseconds, by which measurements are kept short.
double expected_microseconds(const Gemm& gemm) {
  const double bytes = static_cast<double>(gemm.n * gemm.k) * static_cast<double>(size_of(gemm.type));
  const double operations = 2.0 * static_cast<double>(gemm.rows * gemm.n) * static_cast<double>(gemm.k);
  return 2 + bytes / 3e6 + operations / (gemm.type == DType::f32 ? 4e7 : 5e8);
}

std::string fixed(double x, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

}  // namespace

struct Products::Impl {
  Impl(const DeviceInfo& device, Options options)
      : device(device),
        options(std::move(options)),
        memory(this->options.memory,
               cat(device.name, ", sm_", device.major, device.minor, ", ", device.multiprocessors, " multiprocessors, ",
                   driver_version(), ", ", blas() ? blas()->version() : "own kernels")),
        own_workspace(kOwnWorkspaceBytes, "the workspace of products"),
        seconds_left(this->options.seconds) {
    if (blas() != nullptr) blas_workspace = DeviceMemory(kBlasWorkspaceBytes, "cuBLASLt's workspace");
    if (!this->options.reproducible && blas() == nullptr) {
      warning = cat(this->options.no_blas.empty() ? "cuBLASLt is missing" : this->options.no_blas,
                    ". Products go by charonia's own kernels, which are slower for prompts");
    }
  }

  // A shape with the ways chosen so far.
  struct Choices {
    std::array<std::optional<ProductWay>, kClasses.size()> ways;
  };

  Blas* blas() const { return options.reproducible ? nullptr : options.blas.get(); }

  // Our own ways that the workspace allows. The last resort, a tile whose sums stay in one block, needs none of it.
  std::vector<GemmWay> own_ways(const Gemm& gemm) const {
    auto ways = gemm_ways(device, gemm);
    std::erase_if(ways, [&](const GemmWay& way) { return gemm_workspace_bytes(way, gemm) > kOwnWorkspaceBytes; });
    return ways;
  }

  ProductWay by_rule(const Gemm& gemm) const {
    ProductWay way{.own = own_ways(gemm).front()};
    if (blas() != nullptr && gemm.rows > kOwnRows) {
      const auto ways = blas()->ways(gemm, kBlasWorkspaceBytes);
      if (!ways.empty()) way.blas = ways.front();
    }
    return way;
  }

  // Whether a remembered way is one that could be chosen today.
  bool serves(const Gemm& gemm, const ProductWay& way) const {
    const auto own = own_ways(gemm);
    if (std::ranges::find(own, way.own) == own.end()) return false;
    return !way.blas || (blas() != nullptr && blas()->serves(gemm, *way.blas, kBlasWorkspaceBytes));
  }

  void issue(Stream& stream, const Gemm& gemm, const ProductWay& way) {
    if (way.blas && blas() != nullptr &&
        blas()->run(stream, gemm, *way.blas, blas_workspace.data(), kBlasWorkspaceBytes)) {
      add_bias(stream, gemm);
      return;
    }
    // A way was chosen for aligned operands and at most so many rows as there are in the last class.
    const bool as_chosen = vectors(gemm) && gemm_workspace_bytes(way.own, gemm) <= kOwnWorkspaceBytes;
    cuda::gemm(stream, device, gemm, as_chosen ? way.own : own_ways(gemm).front(), own_workspace.data());
  }

  const ProductWay& way_of(const Gemm& gemm) {
    auto& way = chosen[{gemm.type, gemm.out_type, gemm.n, gemm.k}].ways[class_of(gemm.rows)];
    if (!way) {
      auto largest = gemm;
      largest.rows = kClasses[class_of(gemm.rows)];
      way = by_rule(largest);
    }
    return *way;
  }

  struct Operands;
  struct Fastest {
    std::optional<ProductWay> way;
    bool of_all = true;
  };
  Fastest fastest(Stream& stream, const Gemm& gemm, Operands& operands);
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  DeviceInfo device;
  Options options;
  ProductMemory memory;
  DeviceMemory own_workspace, blas_workspace;
  std::map<ProductShape, Choices> chosen;
  double seconds_left;
  std::string warning;
};

// What products are measured with: copies of a weight, so many that one is out of the second-level cache when its turn
// comes again, and an input and an output. The input is made of weights as well: numbers of all kinds, and no cheaper
// to multiply than what a model computes.
struct Products::Impl::Operands {
  explicit Operands(std::size_t bytes) : memory(bytes, "operands to measure products with") {}

  static std::size_t copies(const DeviceInfo& device, const Gemm& gemm) {
    const auto one = matrix_bytes(gemm.type, gemm.n, gemm.weight_stride);
    return std::clamp<std::size_t>(3 * device.l2_bytes / one + 1, 1, kMostTimedProducts);
  }
  static std::size_t bytes(const DeviceInfo& device, const Gemm& gemm) {
    return copies(device, gemm) * matrix_bytes(gemm.type, gemm.n, gemm.weight_stride) +
           matrix_bytes(gemm.type, gemm.rows, round_up(gemm.k, 8)) +
           matrix_bytes(gemm.out_type, gemm.rows, round_up(gemm.n, 8));
  }

  // `gemm` with these operands; its weights are bytes(weight) apart.
  Gemm lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm) {
    auto out = gemm;
    const auto weight_bytes = matrix_bytes(gemm.type, gemm.n, gemm.weight_stride);
    const auto held_bytes = static_cast<std::size_t>(gemm.n * gemm.weight_stride) * size_of(gemm.type);
    auto* at = memory.as<std::byte>();
    out.weight = at;
    for (std::size_t i = 0; i < copies(device, gemm); ++i, at += weight_bytes) {
      stream.copy(at, gemm.weight, held_bytes, "weights to measure with");
    }
    out.in = at;
    out.in_stride = round_up(gemm.k, 8);
    const auto in_bytes = matrix_bytes(gemm.type, gemm.rows, out.in_stride);
    for (std::size_t done = 0; done < in_bytes; done += held_bytes) {
      stream.copy(at + done, gemm.weight, std::min(held_bytes, in_bytes - done), "inputs to measure with");
    }
    at += in_bytes;
    out.out = at;
    out.out_stride = round_up(gemm.n, 8);
    return out;
  }

  DeviceMemory memory;
};

// Of all ways, or of as many as there is time for, the one that takes the least.
Products::Impl::Fastest Products::Impl::fastest(Stream& stream, const Gemm& gemm, Operands& operands) {
  const auto own = own_ways(gemm);
  std::vector<ProductWay> ways;
  for (const auto& way : own) ways.push_back({.own = way});
  if (blas() != nullptr) {
    // By turns, so that both sides are heard when time runs out.
    const auto theirs = blas()->ways(gemm, kBlasWorkspaceBytes);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const auto at = std::min(2 * i + 1, ways.size());
      ways.insert(ways.begin() + static_cast<std::ptrdiff_t>(at), {.blas = theirs[i], .own = own.front()});
    }
  }
  const auto copies = static_cast<int>(Operands::copies(device, gemm));
  const auto weight_bytes = matrix_bytes(gemm.type, gemm.n, gemm.weight_stride);
  auto timed = operands.lay_out(stream, device, gemm);
  const auto* const weights = static_cast<const std::byte*>(timed.weight);
  std::optional<ProductWay> best;
  bool of_all = true;
  for (auto& way : ways) {
    if (seconds_left <= 0) {
      of_all = false;
      break;
    }
    const auto begin = Clock::now();
    bool refused = false;
    try {
      way.microseconds = options.timer(stream, expected_microseconds(gemm), [&](int index) {
        timed.weight = weights + static_cast<std::size_t>(index % copies) * weight_bytes;
        if (way.blas) {
          refused = refused || !blas()->run(stream, timed, *way.blas, blas_workspace.data(), kBlasWorkspaceBytes);
          if (!refused) add_bias(stream, timed);
        } else {
          cuda::gemm(stream, device, timed, way.own, own_workspace.data());
        }
      });
    } catch (const Error&) {  // an algorithm of the library that fails here is one that is not chosen
      if (!way.blas) throw;
      refused = true;
    }
    seconds_left -= std::chrono::duration<double>(Clock::now() - begin).count();
    if (!refused && (!best || way.microseconds < best->microseconds)) best = way;
  }
  if (best && best->blas) {  // the best of our own is what serves where the library refuses
    const auto better = [](const ProductWay& a, const ProductWay& b) {
      const auto rank = [](const ProductWay& way) {
        return way.blas || way.microseconds == 0 ? HUGE_VAL : way.microseconds;
      };
      return rank(a) < rank(b);
    };
    best->own = std::ranges::min_element(ways, better)->own;
  }
  return {best, of_all};
}

void Products::Impl::prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows) {
  // Few rows first: decode steps are most of a server's time.
  struct Wanted {
    Gemm gemm;  // with the class's rows
    Class of;
  };
  std::vector<Wanted> wanted;
  std::size_t operand_bytes = 0;
  const auto most_bytes = std::min(kOperandBytes, free_device_bytes() / 2);
  for (Class of = 0; of < kClasses.size(); ++of) {
    for (auto gemm : shapes) {
      const auto rows = gemm.rows > 0 ? gemm.rows : max_rows;
      if (of > class_of(rows)) continue;
      const ProductShape shape{gemm.type, gemm.out_type, gemm.n, gemm.k};
      auto& way = chosen[shape].ways[of];
      if (way && way->microseconds > 0) continue;
      gemm.rows = kClasses[of];
      gemm.in = gemm.out = nullptr;
      gemm.in_stride = round_up(gemm.k, 8);
      gemm.out_stride = round_up(gemm.n, 8);
      if (const auto known = memory.find(shape, kClasses[of]); known && serves(gemm, *known)) {
        way = *known;
        continue;
      }
      way = by_rule(gemm);
      const auto bytes = Operands::bytes(device, gemm);
      if (!options.timer || bytes > most_bytes) continue;
      operand_bytes = std::max(operand_bytes, bytes);
      wanted.push_back({gemm, of});
    }
  }
  if (wanted.empty() || seconds_left <= 0) return;
  Operands operands(operand_bytes);
  for (const auto& [gemm, of] : wanted) {
    const ProductShape shape{gemm.type, gemm.out_type, gemm.n, gemm.k};
    auto& way = chosen[shape].ways[of];
    if (seconds_left <= 0) break;
    if (way->microseconds > 0) continue;  // the same shape came twice
    const auto best = fastest(stream, gemm, operands);
    if (best.way) way = best.way;
    if (best.way && best.of_all) memory.keep(shape, kClasses[of], *best.way);
  }
  stream.wait("measured products");
  if (auto failure = memory.save(); !failure.empty()) {
    warning = cat(warning, warning.empty() ? "" : "; ", failure);
  }
}

namespace {

Products::Options default_options(bool reproducible) {
  Products::Options options;
  options.reproducible = reproducible;
  if (!reproducible) options.blas = load_cublas(options.no_blas);
  options.memory = product_memory_path();
  options.timer = make_product_timer();
  return options;
}

}  // namespace

Products::Products(const DeviceInfo& device, bool reproducible) : Products(device, default_options(reproducible)) {}
Products::Products(const DeviceInfo& device, Options options)
    : impl_(std::make_unique<Impl>(device, std::move(options))) {}
Products::~Products() = default;

void Products::prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows) {
  impl_->prepare(stream, shapes, max_rows);
}

void Products::run(Stream& stream, const Gemm& gemm) {
  if (gemm.rows == 0) return;
  impl_->issue(stream, gemm, impl_->way_of(gemm));
}

std::vector<std::string> Products::report() const {
  std::vector<std::string> lines;
  for (const auto& [shape, choices] : impl_->chosen) {
    int first_rows = 1;
    for (Class of = 0; of < kClasses.size(); ++of) {
      const auto& way = choices.ways[of];
      if (!way) continue;
      // A line for all neighbours that go one way, with the time of the last.
      if (of + 1 < kClasses.size() && choices.ways[of + 1] && choices.ways[of + 1]->same_way(*way)) continue;
      auto line = cat("rows ", first_rows, "..", kClasses[of], " ", to_string(shape), ": ");
      first_rows = kClasses[of] + 1;
      if (way->blas) {
        line += "cuBLASLt";
      } else {
        constexpr std::array kNames{"stream", "tile", "plain"};
        const auto& own = way->own;
        line += cat("own ", kNames[static_cast<std::size_t>(own.kernel)], " ", own.tile_rows, " x ", own.tile_columns,
                    ", ", own.stages, " stages");
        if (own.k_blocks > 1) line += cat(", ", own.k_blocks, " blocks over k");
      }
      if (way->microseconds > 0) {
        const double bytes = static_cast<double>(shape.n * shape.k) * static_cast<double>(size_of(shape.type));
        const double operations = 2.0 * kClasses[of] * static_cast<double>(shape.n) * static_cast<double>(shape.k);
        line += cat(", ", fixed(way->microseconds, 1), " us, ",
                    kClasses[of] < 256 ? cat(fixed(bytes / way->microseconds / 1e6, 2), " TB/s")
                                       : cat(fixed(operations / way->microseconds / 1e6, 0), " TFLOP/s"));
      } else {
        line += ", by rule";
      }
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::string Products::warning() const { return impl_->warning; }

}  // namespace charonia::cuda
