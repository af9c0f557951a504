#include "ops/cuda/gemm/gemm_runner.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/gemm/autotune_cache.h"
#include "ops/cuda/gemm/dequantised.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// A GEMM uses the choice of the next larger bucket. Buckets end where the time increases (tiles of 8 to 128 rows).
constexpr std::array kBuckets{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192};
using Bucket = std::size_t;

// The bucket of this number of rows; beyond the last bucket, the last one.
Bucket bucket_of(std::int64_t rows) {
  const auto at = std::ranges::lower_bound(kBuckets, rows);
  return std::min(static_cast<Bucket>(at - kBuckets.begin()), kBuckets.size() - 1);
}

// Workspace for partial sums of built-in tactics. A tactic that needs more is not used.
constexpr std::size_t kOwnWorkspaceBytes = std::size_t{16} << 20;
// the workspace that cuBLAS uses on compute capability 9
constexpr std::size_t kBlasWorkspaceBytes = std::size_t{32} << 20;

// Without measurements, up to this number of rows use built-in tactics, which read the weight at memory speed.
constexpr std::int64_t kOwnRows = 32;
// The same for quantised weights, which the library needs dequantised in memory. Up to kOwnRows this is not even
// measured.
constexpr std::int64_t kOwnQuantRows = 128;
// Number of the library's algorithms that are measured for a part of a dequantised weight.
constexpr std::size_t kDequantisedTactics = 3;

// Space for prepared inputs of quantised weights. GEMMs with more rows run in pieces.
constexpr std::size_t kPreparedBytes = std::size_t{16} << 20;
constexpr std::int64_t kMaxPreparedRows = 16384, kMinPreparedRows = 16;

// Maximum memory of operands for measurements. Tactics of GEMMs with more rows are chosen by rule.
constexpr std::size_t kOperandBytes = std::size_t{2} << 30;

std::size_t matrix_bytes(DType type, std::int64_t rows, std::int64_t stride) {
  return static_cast<std::size_t>(round_up(rows * stride * static_cast<std::int64_t>(size_of(type)), 256));
}
std::size_t weight_bytes_of(const Gemm& gemm) {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(weight_bytes(gemm)), 256));
}

// The stride of prepared inputs: in elements, or in bytes for 8-bit codes.
std::int64_t prepared_stride(const Gemm& gemm) { return is_w8a8(gemm) ? gemm.k : round_up(gemm.k, kQuantK); }
bool has_scaled_inputs(const Gemm& gemm) { return is_w8a8(gemm) || has_integer_inputs(gemm.quant->format); }

GemmShape shape_of(const Gemm& gemm) {
  return {gemm.type, gemm.out_type, gemm.n, gemm.k, gemm.quant ? std::optional(gemm.quant->format) : std::nullopt};
}

// A rough estimate in microseconds, to keep measurements short.
double expected_microseconds(const Gemm& gemm) {
  const auto bytes = static_cast<double>(weight_bytes(gemm));
  const double operations =
      (is_w8a8(gemm) ? 1.0 : 2.0) * static_cast<double>(gemm.rows * gemm.n) * static_cast<double>(gemm.k);
  return 2 + bytes / 3e6 + operations / (gemm.type == DType::f32 ? 4e7 : 5e8);
}

std::string fixed(double x, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

}  // namespace

struct GemmRunner::Impl {
  Impl(const DeviceInfo& device, Options options)
      : device(device),
        options(std::move(options)),
        memory(this->options.memory,
               cat(device.name, ", sm_", device.major, device.minor, ", ", device.sms, " SMs, ", driver_version(), ", ",
                   blas() ? blas()->version() : "own kernels", this->options.reproducible ? ", packed weights" : "",
                   this->options.unproven ? ", unproven kernels" : "")),
        own_workspace(kOwnWorkspaceBytes, "the workspace of GEMMs"),
        seconds_left(this->options.seconds) {
    if (blas() != nullptr) blas_workspace = DeviceMemory(kBlasWorkspaceBytes, "cuBLASLt's workspace");
    if (!this->options.reproducible && blas() == nullptr) {
      warning = cat(this->options.no_blas.empty() ? "cuBLASLt is missing" : this->options.no_blas,
                    ". GEMMs use charonia's built-in kernels, which are slower for prompts");
    }
  }

  // GEMMs that the library rejected although one of its algorithms is the choice of their bucket.
  struct Rejected {
    std::int64_t count = 0;
    std::int64_t min_rows = 0, max_rows_seen = 0;
  };

  // The choices for a shape.
  struct Choices {
    std::array<std::optional<GemmCandidate>, kBuckets.size()> tactics;
    Rejected rejected;
  };

  Blas* blas() const { return options.reproducible ? nullptr : options.blas.get(); }
  // Codes are for built-in kernels, except FP8 that is multiplied as FP8.
  Blas* blas_for(const Gemm& gemm) const {
    const bool fp8 = is_w8a8(gemm) && gemm.quant->format.code == ops::Code::f8_e4m3 && !gemm.packed;
    return gemm.quant && !fp8 ? nullptr : blas();
  }

  std::vector<GemmTactic> unproven(const Gemm& gemm) const {
    return options.unproven ? options.unproven(device, gemm) : std::vector<GemmTactic>();
  }

  // The built-in tactics that fit the workspace. The fallback, a tile whose sums stay in one block, needs no workspace.
  std::vector<GemmTactic> own_tactics(const Gemm& gemm) const {
    auto tactics = gemm_tactics(device, gemm, options.reproducible ? SumOrder::fixed : SumOrder::any);
    const auto more = unproven(gemm);
    tactics.insert(tactics.end(), more.begin(), more.end());
    std::erase_if(tactics,
                  [&](const GemmTactic& tactic) { return gemm_workspace_bytes(tactic, gemm) > kOwnWorkspaceBytes; });
    return tactics;
  }

  // Whether the library may multiply the dequantised weight. `dequantised` has memory if there are such weights.
  bool dequantises(const Gemm& gemm) const {
    return blas() != nullptr && dequantised.bytes() > 0 && gemm.rows > kOwnRows && can_dequantise(gemm);
  }

  // The library's candidates, probably fastest first.
  std::vector<GemmCandidate> library_candidates(const Gemm& gemm) const {
    std::vector<GemmCandidate> out;
    if (blas_for(gemm) != nullptr) {
      for (const auto& tactic : blas()->tactics(gemm, kBlasWorkspaceBytes)) out.push_back({.blas = tactic});
    }
    if (!dequantises(gemm)) return out;
    for (const auto rows : dequantised_parts(gemm.n, gemm.k, dequantised.bytes(), device.l2_bytes)) {
      const auto part = dequantised_part(gemm, 0, std::min(rows, gemm.n), dequantised.data());
      auto tactics = blas()->tactics(part, kBlasWorkspaceBytes);
      if (tactics.size() > kDequantisedTactics) tactics.resize(kDequantisedTactics);
      for (const auto& tactic : tactics) out.push_back({.blas = tactic, .dequantised_rows = rows});
    }
    return out;
  }

  GemmCandidate by_rule(const Gemm& gemm) const {
    GemmCandidate tactic;
    if (gemm.rows > (blas_for(gemm) != nullptr ? kOwnRows : kOwnQuantRows)) {
      if (const auto theirs = library_candidates(gemm); !theirs.empty()) tactic = theirs.front();
    }
    tactic.own = own_tactics(gemm).front();
    return tactic;
  }

  // Whether a stored tactic is still a valid choice.
  bool serves(const Gemm& gemm, const GemmCandidate& tactic) const {
    const auto own = own_tactics(gemm);
    if (std::ranges::find(own, tactic.own) == own.end()) return false;
    const auto rows = tactic.dequantised_rows;
    if (rows == 0) {
      return !tactic.blas || (blas_for(gemm) != nullptr && blas()->serves(gemm, *tactic.blas, kBlasWorkspaceBytes));
    }
    if (!tactic.blas || rows < 0 || rows % kQuantRows != 0 || rows > round_up(gemm.n, kQuantRows) ||
        !dequantises(gemm) || dequantised_bytes(rows, gemm.k) > dequantised.bytes()) {
      return false;
    }
    const auto serves_part = [&](std::int64_t first) {
      const auto part = dequantised_part(gemm, first, std::min(rows, gemm.n - first), dequantised.data());
      return blas()->serves(part, *tactic.blas, kBlasWorkspaceBytes);
    };
    return serves_part(0) && serves_part((gemm.n - 1) / rows * rows);  // the last part may be shorter
  }

  // Runs the GEMM by the library, with the bias. Returns false if the library rejects it; `out` is then undefined.
  bool run_library(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic) const {
    const bool taken =
        tactic.dequantised_rows > 0
            ? run_dequantised(stream, *blas(), gemm, tactic.dequantised_rows, *tactic.blas, dequantised.data(),
                              blas_workspace.data(), kBlasWorkspaceBytes)
            : blas()->run(stream, gemm, *tactic.blas, blas_workspace.data(), kBlasWorkspaceBytes);
    if (taken) add_bias(stream, gemm);
    return taken;
  }

  // Prepares the inputs of a quantised weight and runs the GEMM, in pieces if the prepared inputs exceed their memory.
  void issue_prepared(Stream& stream, const Gemm& gemm) {
    const auto element = static_cast<std::int64_t>(size_of(gemm.type));
    const auto stride = prepared_stride(gemm), row_bytes = stride * (is_w8a8(gemm) ? 1 : element);
    const auto most = std::min(kMaxPreparedRows, static_cast<std::int64_t>(prepared.bytes()) / row_bytes);
    if (most < 1) throw Error(ErrorCode::internal, cat("no room for inputs of ", gemm.k, " columns"));
    for (std::int64_t row = 0; row < gemm.rows; row += most) {
      auto piece = gemm;
      piece.rows = std::min(most, gemm.rows - row);
      piece.in = static_cast<const std::byte*>(gemm.in) + row * gemm.in_stride * element;
      piece.out =
          static_cast<std::byte*>(gemm.out) + row * gemm.out_stride * static_cast<std::int64_t>(size_of(gemm.out_type));
      if (is_w8a8(gemm)) {
        quantise_inputs(stream, piece, prepared.data(), prepared_scales.as<float>());
      } else {
        prepare_quant_inputs(stream, piece, prepared.data(), stride, prepared_scales.as<float>());
      }
      piece.in = prepared.data();
      piece.in_stride = stride;
      piece.quant->prepared = true;
      if (has_scaled_inputs(piece)) piece.quant->row_scales = prepared_scales.as<float>();
      issue(stream, piece);
    }
  }

  void issue(Stream& stream, const Gemm& gemm) {
    if (gemm.quant && needs_prepared_inputs(gemm)) return issue_prepared(stream, gemm);
    const auto shape = shape_of(gemm);
    auto& choices = chosen[shape];
    const auto& tactic = candidate_of(choices, gemm);
    if (tactic.blas && blas() != nullptr) {
      if (run_library(stream, gemm, tactic)) return;
      note_rejection(shape, gemm.rows, choices.rejected);
    }
    // A tactic was chosen for aligned operands and at most the rows of the last bucket.
    const bool as_chosen =
        (gemm.quant || vectors(gemm)) && gemm_workspace_bytes(tactic.own, gemm) <= kOwnWorkspaceBytes;
    cuda::gemm(stream, device, gemm, as_chosen ? tactic.own : own_tactics(gemm).front(), own_workspace.data());
  }

  bool issue_gated(Stream& stream, const Gemm& gemm) {
    if (gemm.quant || gemm.type == DType::f32 || gemm.out_type != gemm.type || !vectors(gemm)) return false;
    const auto& tactic = candidate_of(chosen[shape_of(gemm)], gemm);
    if ((tactic.blas && blas() != nullptr) || !supports_gates(tactic.own)) return false;
    if (gemm.rows > 0) cuda::gemm(stream, device, gemm, tactic.own, own_workspace.data());
    return true;
  }

  void note_rejection(const GemmShape& shape, std::int64_t rows, Rejected& of_shape) {
    of_shape.min_rows = of_shape.count == 0 ? rows : std::min(of_shape.min_rows, rows);
    of_shape.max_rows_seen = std::max(of_shape.max_rows_seen, rows);
    ++of_shape.count;
    if (rejected.fetch_add(1, std::memory_order_relaxed) > 0) return;
    log({LogLevel::warning,
         cat("cuBLASLt rejected a GEMM of ", rows, " rows, ", to_string(shape),
             ", with the algorithm that was chosen for up to ", kBuckets[bucket_of(rows)],
             " rows. A built-in kernel computes it, which is slower for prompts. "
             "Later rejections are counted in charonia_gemms_rejected_total and listed in the kernel report"),
         "",
         {{"rows", rows}, {"n", shape.n}, {"k", shape.k}}});
  }

  const GemmCandidate& candidate_of(Choices& choices, const Gemm& gemm) {
    auto& tactic = choices.tactics[bucket_of(gemm.rows)];
    if (!tactic) {
      auto largest = gemm;
      largest.rows = kBuckets[bucket_of(gemm.rows)];
      largest.gate = Gate::none;
      tactic = by_rule(largest);
    }
    return *tactic;
  }

  struct Operands;
  struct Fastest {
    std::optional<GemmCandidate> tactic;
    bool of_all = true;
  };
  Fastest fastest(Stream& stream, const Gemm& gemm, Operands& operands);
  bool gives_right_bits(Stream& stream, const Gemm& gemm, const GemmTactic& tactic);
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  DeviceInfo device;
  Options options;
  AutotuneCache memory;
  DeviceMemory own_workspace, blas_workspace;
  DeviceMemory prepared, prepared_scales;  // inputs of quantised weights
  DeviceMemory dequantised;                // dequantised numbers of a part of such a weight
  std::map<GemmShape, Choices> chosen;
  double seconds_left;
  std::string warning;
  std::atomic<std::int64_t> rejected = 0;
};

// The operands of measurements: enough copies of a weight that each has left the L2 cache before its next use, an input
// and an output. The input consists of weights too: realistic numbers, which cost as much to multiply as a model's
// activations.
struct GemmRunner::Impl::Operands {
  explicit Operands(std::size_t bytes) : memory(bytes, "operands to measure GEMMs with") {}

  static std::size_t copies(const DeviceInfo& device, const Gemm& gemm) {
    const auto one = weight_bytes_of(gemm);
    return std::clamp<std::size_t>(3 * device.l2_bytes / one + 1, 1, kMaxTimedGemms);
  }
  static std::size_t bytes(const DeviceInfo& device, const Gemm& gemm) {
    return copies(device, gemm) * weight_bytes_of(gemm) + matrix_bytes(gemm.type, gemm.rows, gemm.in_stride) +
           matrix_bytes(gemm.out_type, gemm.rows, round_up(gemm.n, 8));
  }

  // Returns `gemm` with these operands; its weights are bytes(weight) apart.
  Gemm lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm) {
    auto out = gemm;
    const auto weight_bytes = weight_bytes_of(gemm);
    const auto held_bytes = cuda::weight_bytes(gemm);
    auto* at = memory.as<std::byte>();
    out.weight = at;
    for (std::size_t i = 0; i < copies(device, gemm); ++i, at += weight_bytes) {
      stream.copy(at, gemm.weight, held_bytes, "weights to measure with");
    }
    out.in = at;
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

// Whether the tactic gives the bits of the first built-in tactic, which has the same order of additions. Otherwise adds
// a warning.
bool GemmRunner::Impl::gives_right_bits(Stream& stream, const Gemm& gemm, const GemmTactic& tactic) {
  std::vector<std::byte> out[2];
  const std::array tactics{gemm_tactics(device, gemm).front(), tactic};
  for (std::size_t i = 0; i < tactics.size(); ++i) {
    out[i].resize(matrix_bytes(gemm.out_type, gemm.rows, gemm.out_stride));
    stream.fill_zero(gemm.out, out[i].size(), "the check of a kernel");
    cuda::gemm(stream, device, gemm, tactics[i], own_workspace.data());
    stream.download(out[i].data(), gemm.out, out[i].size(), "the check of a kernel");
    stream.wait("the check of a kernel");
  }
  if (out[0] == out[1]) return true;
  warning += cat(warning.empty() ? "" : "; ", "the kernel ", to_string(tactic), " is not used for ",
                 to_string(shape_of(gemm)), " and ", gemm.rows, " rows, because it gives other bits than ",
                 to_string(tactics[0]));
  return false;
}

// Returns the fastest of all tactics, or of as many as there is time for.
GemmRunner::Impl::Fastest GemmRunner::Impl::fastest(Stream& stream, const Gemm& gemm, Operands& operands) {
  const auto own = own_tactics(gemm), unproven = this->unproven(gemm);
  std::vector<GemmCandidate> tactics;
  for (const auto& tactic : own) tactics.push_back({.own = tactic});
  // Alternates between library and built-in tactics, so that both are measured if time runs out.
  auto theirs = library_candidates(gemm);
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    theirs[i].own = own.front();
    const auto at = std::min(2 * i + 1, tactics.size());
    tactics.insert(tactics.begin() + static_cast<std::ptrdiff_t>(at), theirs[i]);
  }
  const auto copies = static_cast<int>(Operands::copies(device, gemm));
  const auto weight_bytes = weight_bytes_of(gemm);
  auto timed = operands.lay_out(stream, device, gemm);
  const auto* const weights = static_cast<const std::byte*>(timed.weight);
  std::optional<GemmCandidate> best;
  bool of_all = true;
  for (auto& tactic : tactics) {
    if (seconds_left <= 0) {
      of_all = false;
      break;
    }
    const auto begin = Clock::now();
    timed.weight = weights;
    const bool checked = !tactic.blas && std::ranges::find(unproven, tactic.own) != unproven.end();
    if (checked && !gives_right_bits(stream, timed, tactic.own)) continue;
    bool rejected = false;
    try {
      tactic.microseconds = options.timer(stream, expected_microseconds(gemm), [&](int index) {
        timed.weight = weights + static_cast<std::size_t>(index % copies) * weight_bytes;
        if (tactic.blas) {
          rejected = rejected || !run_library(stream, timed, tactic);
        } else {
          cuda::gemm(stream, device, timed, tactic.own, own_workspace.data());
        }
      });
    } catch (const Error&) {
      // A library algorithm that fails here is not chosen. The same applies to a cluster that does not fit on this
      // device.
      const bool optional = tactic.blas || tactic.own.sums == GemmTactic::Sums::cluster;
      if (!optional) throw;
      rejected = true;
    }
    seconds_left -= std::chrono::duration<double>(Clock::now() - begin).count();
    if (!rejected && (!best || tactic.microseconds < best->microseconds)) best = tactic;
  }
  if (best && best->blas) {  // the best built-in tactic is the fallback if the library rejects the GEMM
    const auto better = [](const GemmCandidate& a, const GemmCandidate& b) {
      const auto rank = [](const GemmCandidate& tactic) {
        return tactic.blas || tactic.microseconds == 0 ? HUGE_VAL : tactic.microseconds;
      };
      return rank(a) < rank(b);
    };
    best->own = std::ranges::min_element(tactics, better)->own;
  }
  return {best, of_all};
}

void GemmRunner::Impl::prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows) {
  // Few rows first, because a server spends most of its time in decode steps.
  struct Wanted {
    Gemm gemm;  // with the bucket's rows
    Bucket of;
  };
  std::vector<Wanted> wanted;
  std::size_t operand_bytes = 0;
  const auto max_bytes = std::min(kOperandBytes, free_device_bytes() / 2);
  for (Bucket of = 0; of < kBuckets.size(); ++of) {
    for (auto gemm : shapes) {
      const auto rows = gemm.rows > 0 ? gemm.rows : max_rows;
      if (of > bucket_of(rows)) continue;
      const auto shape = shape_of(gemm);
      auto& tactic = chosen[shape].tactics[of];
      if (tactic && tactic->microseconds > 0) continue;
      gemm.rows = kBuckets[of];
      gemm.in = gemm.out = nullptr;
      gemm.in_stride = round_up(gemm.k, 8);
      gemm.out_stride = round_up(gemm.n, 8);
      if (gemm.quant) {
        gemm.quant->prepared = true;
        if (has_scaled_inputs(gemm)) gemm.quant->row_scales = prepared_scales.as<float>();
        if (is_w8a8(gemm)) gemm.in_stride = prepared_stride(gemm);
      }
      if (const auto known = memory.find(shape, kBuckets[of]); known && serves(gemm, *known)) {
        tactic = *known;
        continue;
      }
      tactic = by_rule(gemm);
      const auto bytes = Operands::bytes(device, gemm);
      if (!options.timer || bytes > max_bytes) continue;
      operand_bytes = std::max(operand_bytes, bytes);
      wanted.push_back({gemm, of});
    }
  }
  if (wanted.empty() || seconds_left <= 0) return;
  Operands operands(operand_bytes);
  for (const auto& [gemm, of] : wanted) {
    const auto shape = shape_of(gemm);
    auto& tactic = chosen[shape].tactics[of];
    if (seconds_left <= 0) break;
    if (tactic->microseconds > 0) continue;  // the same shape occurs twice
    const auto best = fastest(stream, gemm, operands);
    if (best.tactic) tactic = best.tactic;
    if (best.tactic && best.of_all) memory.keep(shape, kBuckets[of], *best.tactic);
  }
  stream.wait("measured GEMMs");
  if (auto failure = memory.save(); !failure.empty()) {
    warning = cat(warning, warning.empty() ? "" : "; ", failure);
  }
}

namespace {

GemmRunner::Options default_options(bool reproducible) {
  GemmRunner::Options options;
  options.reproducible = reproducible;
  if (!reproducible) options.blas = load_cublas(options.no_blas);
  options.memory = autotune_cache_path();
  options.timer = make_gemm_timer();
  if (const char* const said = std::getenv("CHARONIA_CUDA_UNPROVEN"); said != nullptr && *said != '\0') {
    const std::string_view value = said;
    if (value != "0" && value != "1") {
      throw Error(ErrorCode::invalid_argument, cat("CHARONIA_CUDA_UNPROVEN = '", value, "': it must be 0 or 1"));
    }
    if (value == "1") options.unproven = unproven_tactics;
  }
  if (const char* const said = std::getenv("CHARONIA_CUDA_MEASURE_S"); said != nullptr) {
    const auto seconds = parse_number<double>(said);
    if (!seconds || !(*seconds >= 0)) {
      throw Error(ErrorCode::invalid_argument,
                  cat("CHARONIA_CUDA_MEASURE_S = '", said, "': it must be a number of seconds, 0 or more"));
    }
    options.seconds = *seconds;
  }
  return options;
}

}  // namespace

GemmRunner::GemmRunner(const DeviceInfo& device, bool reproducible)
    : GemmRunner(device, default_options(reproducible)) {}
GemmRunner::GemmRunner(const DeviceInfo& device, Options options)
    : impl_(std::make_unique<Impl>(device, std::move(options))) {}
GemmRunner::~GemmRunner() = default;

void GemmRunner::prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows) {
  impl_->prepare(stream, shapes, max_rows);
}

void GemmRunner::reserve(const Gemm& gemm) {
  const auto row = static_cast<std::size_t>(round_up(gemm.k, kQuantK)) * sizeof(float);
  const auto bytes = std::max(kPreparedBytes, static_cast<std::size_t>(kMinPreparedRows) * row);
  if (impl_->prepared.bytes() < bytes) impl_->prepared = DeviceMemory(bytes, "prepared inputs of GEMMs");
  if (impl_->prepared_scales.bytes() == 0) {
    impl_->prepared_scales = DeviceMemory(kMaxPreparedRows * sizeof(float), "scales of prepared inputs");
  }
  if (impl_->blas() == nullptr || !can_dequantise(gemm)) return;
  const auto room = std::min(impl_->options.dequantised_bytes, dequantised_bytes(gemm.n, gemm.k));
  if (impl_->dequantised.bytes() < room) impl_->dequantised = DeviceMemory(room, "a part of a weight, dequantised");
}

std::optional<RowCodes> GemmRunner::room_for_codes(const Gemm& gemm) {
  const auto& prepared = impl_->prepared;
  if (!is_w8a8(gemm) || gemm.quant->order != nullptr || gemm.rows > kMaxPreparedRows ||
      static_cast<std::size_t>(gemm.rows * gemm.k) > prepared.bytes()) {
    return std::nullopt;
  }
  return RowCodes{.codes = prepared.as<unsigned char>(),
                  .scales = impl_->prepared_scales.as<float>(),
                  .scale = gemm.quant->input_scale,
                  .fp8 = gemm.quant->format.code == ops::Code::f8_e4m3};
}

Gemm GemmRunner::codes_given(const Gemm& gemm, const RowCodes& codes) {
  auto out = gemm;
  out.in = codes.codes;
  out.in_stride = gemm.k;
  out.quant->prepared = true;
  out.quant->row_scales = codes.scales;
  return out;
}

void GemmRunner::run(Stream& stream, const Gemm& gemm) {
  if (gemm.rows == 0) return;
  impl_->issue(stream, gemm);
}

bool GemmRunner::run_gated(Stream& stream, const Gemm& gemm) { return impl_->issue_gated(stream, gemm); }

std::string to_string(const GemmTactic& tactic) {
  constexpr std::array kNames{"stream", "tile", "plain", "bulk"};
  constexpr std::array kSums{"", ", one sum each", ", a cluster"};
  return cat(kNames[static_cast<std::size_t>(tactic.kernel)], " ", tactic.tile_rows, " x ", tactic.tile_columns, ", ",
             tactic.stages, " stages",
             tactic.kernel == GemmTactic::Kernel::bulk ? cat(", ", tactic.k_blocks, " blocks")
             : tactic.k_blocks > 1
                 ? cat(", ", tactic.k_blocks, " blocks over k", kSums[static_cast<std::size_t>(tactic.sums)])
                 : "");
}

std::vector<std::string> GemmRunner::report() const {
  std::vector<std::string> lines;
  for (const auto& [shape, choices] : impl_->chosen) {
    int first_rows = 1;
    for (Bucket of = 0; of < kBuckets.size(); ++of) {
      const auto& tactic = choices.tactics[of];
      if (!tactic) continue;
      // One line for all neighbouring buckets with one choice, with the last bucket's time.
      if (of + 1 < kBuckets.size() && choices.tactics[of + 1] && choices.tactics[of + 1]->same_tactic(*tactic))
        continue;
      auto line = cat("rows ", first_rows, "..", kBuckets[of], " ", to_string(shape), ": ");
      first_rows = kBuckets[of] + 1;
      if (tactic->dequantised_rows > 0) {
        line += cat("dequantised ", tactic->dequantised_rows, " rows at a time, cuBLASLt");
      } else if (tactic->blas) {
        line += "cuBLASLt";
      } else {
        line += cat("own ", to_string(tactic->own));
      }
      if (tactic->microseconds > 0) {
        const double bytes = shape.quant
                                 ? static_cast<double>(quant_code_bytes(*shape.quant, shape.n, shape.k))
                                 : static_cast<double>(shape.n * shape.k) * static_cast<double>(size_of(shape.type));
        const double operations = 2.0 * kBuckets[of] * static_cast<double>(shape.n) * static_cast<double>(shape.k);
        line += cat(", ", fixed(tactic->microseconds, 1), " us, ",
                    kBuckets[of] < 256 ? cat(fixed(bytes / tactic->microseconds / 1e6, 2), " TB/s")
                                       : cat(fixed(operations / tactic->microseconds / 1e6, 0), " TFLOP/s"));
      } else {
        line += ", by rule";
      }
      lines.push_back(std::move(line));
    }
    if (const auto& rejected = choices.rejected; rejected.count > 0) {
      lines.push_back(cat(to_string(shape), ": cuBLASLt rejected ", rejected.count, " GEMMs of ", rejected.min_rows,
                          "..", rejected.max_rows_seen, " rows, which own kernels took"));
    }
  }
  return lines;
}

std::int64_t GemmRunner::rejected() const { return impl_->rejected.load(std::memory_order_relaxed); }

bool GemmRunner::packs(DType weight) const { return weight != DType::f32 && impl_->options.reproducible; }

std::string GemmRunner::library() const {
  if (const auto* const blas = impl_->blas()) return blas->version();
  const auto& options = impl_->options;
  return options.reproducible      ? "own kernels only, for reproducible results"
         : options.no_blas.empty() ? "own kernels only"
                                   : cat("own kernels only: ", options.no_blas);
}

std::string GemmRunner::warning() const { return impl_->warning; }

}  // namespace charonia::cuda
