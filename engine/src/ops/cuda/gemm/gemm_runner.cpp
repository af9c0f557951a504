#include "ops/cuda/gemm/gemm_runner.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/gemm/autotune_cache.h"
#include "ops/cuda/gemm/dequantised.h"
#include "ops/cuda/gemm/gemm_operands.h"
#include "ops/cuda/gemm/integer_parts.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"
#include "ops/cuda/kernels/rows.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

using Kernel = GemmTactic::Kernel;
using Clock = std::chrono::steady_clock;

// A GEMM uses the choice of the next larger bucket. Buckets end where the time increases (tiles of 8 to 128 rows).
constexpr std::array kBuckets{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192};
using Bucket = std::size_t;

// The bucket of this number of rows; beyond the last bucket, the last one.
Bucket bucket_of(std::int64_t rows) {
  const auto at = std::ranges::lower_bound(kBuckets, rows);
  return std::min(static_cast<Bucket>(at - kBuckets.begin()), kBuckets.size() - 1);
}

// Workspace for partial sums of built-in tactics. A tactic that needs more is not used. Enough for 132 blocks (H200) of
// the wgmma kernel with the sums of two tiles.
constexpr std::size_t kOwnWorkspaceBytes = std::size_t{18} << 20;
// the workspace that cuBLAS uses on compute capability 9
constexpr std::size_t kBlasWorkspaceBytes = std::size_t{32} << 20;

// Without measurements, up to this number of rows use built-in tactics, which read the weight at memory speed.
constexpr std::int64_t kOwnRows = 32;
// The same for quantised weights, which the library needs dequantised in memory. Up to kOwnRows this is not even
// measured.
constexpr std::int64_t kOwnQuantRows = 128;
// Number of the library's algorithms that are measured for a part of a dequantised weight, and for padded rows.
constexpr std::size_t kFewTactics = 3;
// GEMMs of up to half of these rows are also measured as GEMMs of these rows by the library, which is often faster.
constexpr std::int64_t kPaddedRows = 16;

// GEMMs of up to this number of rows may be computed together with their gate.
constexpr std::int64_t kGatedRows = 16;
// Number of kernels with wrong results that a warning names.
constexpr std::size_t kNamedKernels = 4;

// Space for prepared inputs of quantised weights. GEMMs with more rows run in pieces.
constexpr std::size_t kPreparedBytes = std::size_t{16} << 20;
constexpr std::int64_t kMaxPreparedRows = 16384, kMinPreparedRows = 16;

// Maximum memory of operands for measurements, if half of the free memory is more than kGemmOperandBytes. Tactics of
// GEMMs that need more are chosen by rule.
constexpr std::size_t kOperandBytes = std::size_t{2} << 30;

// The stride of prepared inputs: in elements, or in bytes for 8-bit codes.
std::int64_t prepared_stride(const Gemm& gemm) { return is_w8a8(gemm) ? gemm.k : round_up(gemm.k, kQuantK); }
bool has_scaled_inputs(const Gemm& gemm) { return is_w8a8(gemm) || has_integer_inputs(gemm.quant->format); }

GemmShape shape_of(const Gemm& gemm) {
  return {gemm.type, gemm.out_type, gemm.n,      gemm.k, gemm.quant ? std::optional(gemm.quant->format) : std::nullopt,
          gemm.gate, gemm.ordered};
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

Gemm without_gate(Gemm gemm) {
  gemm.gate = Gate::none;
  return gemm;
}

// Whether a kernel may compute the GEMM with its gate.
bool can_gate(const Gemm& gemm) {
  return gemm.gate != Gate::none && !gemm.quant && gemm.type != DType::f32 && gemm.out_type == gemm.type &&
         gemm.n % 2 == 0 && vectors(gemm);
}

// out [rows, n / 2] = the gate of a GEMM's outputs.
void apply_gate(Stream& stream, const Gemm& gemm, void* out) {
  gated_activation(stream, {out, gemm.out_type, gemm.rows, gemm.n / 2, gemm.out_stride},
                   {gemm.out, gemm.out_type, gemm.rows, gemm.n, gemm.out_stride},
                   gemm.gate == Gate::silu ? ops::Activation::silu : ops::Activation::gelu_tanh);
}

std::string name_of(const GemmCandidate& tactic) {
  if (tactic.apart) return "GEMM and gate apart";
  if (tactic.dequantised_rows > 0) return cat("dequantised ", tactic.dequantised_rows, " rows at a time, cuBLASLt");
  if (tactic.integer_rows > 0) return cat("cuBLASLt in int8, ", tactic.integer_rows, " rows at a time");
  if (!tactic.blas) return cat("own ", to_string(tactic.own));
  return tactic.padded_rows > 0 ? cat("cuBLASLt, padded to ", tactic.padded_rows, " rows") : "cuBLASLt";
}

std::string key_of_results(const DeviceInfo& device, const GemmRunner::Options& options, const std::string& library) {
  return autotune_key(device, cat(library, options.reproducible ? ", packed weights" : ""), options.overlap,
                      options.unproven);
}

}  // namespace

struct GemmRunner::Impl {
  Impl(const DeviceInfo& device, Options options)
      : device(device),
        options(std::move(options)),
        memory(this->options.memory,
               key_of_results(device, this->options, blas() ? blas()->version() : "own kernels")),
        own_workspace(kOwnWorkspaceBytes, "the workspace of GEMMs"),
        seconds_left(this->options.seconds) {
    if (blas() != nullptr) blas_workspace = DeviceMemory(kBlasWorkspaceBytes, "cuBLASLt's workspace");
    if (!this->options.reproducible && blas() == nullptr) {
      warning = cat(this->options.no_blas.empty() ? "cuBLASLt is missing" : this->options.no_blas,
                    ". GEMMs use charonia's built-in kernels, which are slower for prompts");
    }
  }

  // Counts GEMMs whose bucket has an algorithm of the library, and which a built-in kernel computed: the library
  // rejected the GEMM, or there was no memory to pad its rows.
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
    return gemm.ordered || (gemm.quant && !fp8) ? nullptr : blas();
  }

  // The built-in tactics that fit the workspace. The fallback, a tile whose sums stay in one block, needs no workspace.
  std::vector<GemmTactic> own_tactics(const Gemm& gemm) const {
    const bool fixed = options.reproducible || gemm.ordered;
    auto tactics = gemm_tactics(device, gemm, fixed ? SumOrder::fixed : SumOrder::any);
    std::erase_if(tactics, [&](const GemmTactic& tactic) {
      return (unproven(tactic) && !options.unproven) || gemm_workspace_bytes(tactic, gemm) > kOwnWorkspaceBytes ||
             (gemm.gate != Gate::none && !supports_gates(tactic));
    });
    return tactics;
  }

  // The GEMM with padded rows, if the tactic asks for them.
  static Gemm padded(Gemm gemm, const GemmCandidate& tactic) {
    gemm.rows = std::max(gemm.rows, tactic.padded_rows);
    return gemm;
  }
  // Whether the operands of the GEMM have memory for the rows of the tactic.
  static bool has_rows(const Gemm& gemm, const GemmCandidate& tactic) {
    return tactic.padded_rows <= std::max(gemm.rows, gemm.row_capacity);
  }
  static bool may_pad(const Gemm& gemm) { return gemm.rows <= kPaddedRows / 2 && gemm.row_capacity >= kPaddedRows; }

  // Whether the library may multiply the dequantised weight. `dequantised` has memory if there are such weights.
  bool dequantises(const Gemm& gemm) const {
    return blas() != nullptr && dequantised.bytes() > 0 && gemm.rows > kOwnRows && can_dequantise(gemm);
  }

  // Whether the library may multiply int8 codes.
  bool multiplies_integers(const Gemm& gemm) const {
    return blas() != nullptr && dequantised.bytes() > 0 && gemm.rows > kOwnRows && has_integer_codes(gemm);
  }

  // The library's candidates, probably fastest first.
  std::vector<GemmCandidate> library_candidates(const Gemm& gemm) const {
    std::vector<GemmCandidate> out;
    if (gemm.gate != Gate::none) return out;
    if (blas_for(gemm) != nullptr) {
      for (const auto& tactic : blas()->tactics(gemm, kBlasWorkspaceBytes)) out.push_back({.blas = tactic});
      if (may_pad(gemm)) {
        const GemmCandidate candidate{.padded_rows = kPaddedRows};
        auto tactics = blas()->tactics(padded(gemm, candidate), kBlasWorkspaceBytes);
        if (tactics.size() > kFewTactics) tactics.resize(kFewTactics);
        for (const auto& tactic : tactics) {
          out.push_back(candidate);
          out.back().blas = tactic;
        }
      }
    }
    if (multiplies_integers(gemm)) {
      for (const auto rows : integer_part_rows(gemm, dequantised.bytes(), device.l2_bytes)) {
        auto tactics = blas()->tactics(integer_part(gemm, 0, std::min(rows, gemm.n), dequantised.data()),
                                       kBlasWorkspaceBytes);
        if (tactics.size() > kFewTactics) tactics.resize(kFewTactics);
        for (const auto& tactic : tactics) out.push_back({.blas = tactic, .integer_rows = rows});
      }
    }
    if (!dequantises(gemm)) return out;
    for (const auto rows : dequantised_parts(gemm.n, gemm.k, dequantised.bytes(), device.l2_bytes)) {
      const auto part = dequantised_part(gemm, 0, std::min(rows, gemm.n), dequantised.data());
      auto tactics = blas()->tactics(part, kBlasWorkspaceBytes);
      if (tactics.size() > kFewTactics) tactics.resize(kFewTactics);
      for (const auto& tactic : tactics) out.push_back({.blas = tactic, .dequantised_rows = rows});
    }
    return out;
  }

  GemmCandidate by_rule(const Gemm& gemm) const {
    GemmCandidate tactic;
    // The library's int8 GEMMs were never measured, so they are not used by rule.
    if (!has_integer_codes(gemm) && gemm.rows > (blas_for(gemm) != nullptr ? kOwnRows : kOwnQuantRows)) {
      if (const auto theirs = library_candidates(gemm); !theirs.empty()) tactic = theirs.front();
    }
    tactic.own = own_tactics(gemm).front();
    return tactic;
  }

  // A GEMM with a gate gets no choice: it follows the choice of the GEMM without the gate.
  void choose_by_rule(const Gemm& gemm, std::optional<GemmCandidate>& choice) const {
    choice.reset();
    if (gemm.gate == Gate::none) choice = by_rule(gemm);
  }

  // For a GEMM whose other candidates have wrong results.
  GemmCandidate reference(const Gemm& gemm) const {
    return {.own = reference_tactic(device, gemm), .apart = gemm.gate != Gate::none};
  }

  // Whether a stored tactic is still a valid choice.
  bool serves(const Gemm& gemm, const GemmCandidate& tactic) const {
    const auto own = own_tactics(gemm);
    if (std::ranges::find(own, tactic.own) == own.end()) return false;
    if (gemm.gate == Gate::none ? tactic.apart : tactic.blas.has_value()) return false;
    const auto serves_parts = [&](std::int64_t part_rows, const auto& part_of) {
      const auto last = (gemm.n - 1) / part_rows * part_rows;  // it may be shorter
      return std::ranges::all_of(std::array{std::int64_t{0}, last}, [&](std::int64_t first) {
        const auto part = part_of(gemm, first, std::min(part_rows, gemm.n - first), dequantised.data());
        return blas()->serves(part, *tactic.blas, kBlasWorkspaceBytes);
      });
    };
    if (tactic.integer_rows > 0) {
      return tactic.blas && multiplies_integers(gemm) && tactic.integer_rows <= round_up(gemm.n, kIntegerTileRows) &&
             integer_part_bytes(gemm, tactic.integer_rows) <= dequantised.bytes() &&
             serves_parts(tactic.integer_rows, integer_part);
    }
    const auto rows = tactic.dequantised_rows;
    if (rows == 0) {
      const bool known_rows = tactic.padded_rows == 0 || (tactic.padded_rows == kPaddedRows && may_pad(gemm));
      return !tactic.blas || (blas_for(gemm) != nullptr && known_rows &&
                              blas()->serves(padded(gemm, tactic), *tactic.blas, kBlasWorkspaceBytes));
    }
    return tactic.blas && rows > 0 && rows % kQuantRows == 0 && rows <= round_up(gemm.n, kQuantRows) &&
           dequantises(gemm) && dequantised_bytes(rows, gemm.k) <= dequantised.bytes() &&
           serves_parts(rows, dequantised_part);
  }

  // Runs the GEMM by the library, with the bias. Returns false if the library rejects it; `out` is then undefined.
  bool run_library(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic) const {
    if (tactic.integer_rows > 0) {
      // More rows than in the last bucket can need smaller parts.
      if (integer_part_bytes(gemm, tactic.integer_rows) > dequantised.bytes()) return false;
      return run_integers(stream, *blas(), gemm, tactic.integer_rows, *tactic.blas, dequantised.data(),
                          blas_workspace.data(), kBlasWorkspaceBytes);
    }
    const bool taken =
        tactic.dequantised_rows > 0
            ? run_dequantised(stream, *blas(), gemm, tactic.dequantised_rows, *tactic.blas, dequantised.data(),
                              blas_workspace.data(), kBlasWorkspaceBytes)
            : blas()->run(stream, padded(gemm, tactic), *tactic.blas, blas_workspace.data(), kBlasWorkspaceBytes);
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
      piece.row_capacity = std::max<std::int64_t>(gemm.row_capacity - row, 0);
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
      const bool fits = has_rows(gemm, tactic);
      if (fits && run_library(stream, gemm, tactic)) return;
      note_rejection(fits, shape, gemm.rows, choices.rejected);
    }
    // A tactic was chosen for aligned operands and at most the rows of the last bucket.
    const bool as_chosen =
        (gemm.quant || vectors(gemm)) && gemm_workspace_bytes(tactic.own, gemm) <= kOwnWorkspaceBytes;
    cuda::gemm(stream, device, gemm, as_chosen ? tactic.own : own_tactics(gemm).front(), own_workspace.data());
  }

  bool issue_gated(Stream& stream, const Gemm& gemm) {
    if (!can_gate(gemm)) return false;
    std::optional<GemmCandidate> tactic;
    if (const auto found = chosen.find(shape_of(gemm)); found != chosen.end()) {
      tactic = found->second.tactics[bucket_of(gemm.rows)];
    }
    if (!tactic) {  // the gate was not measured
      tactic = candidate_of(chosen[shape_of(without_gate(gemm))], without_gate(gemm));
      if (tactic->own.kernel != Kernel::stream) return false;
    }
    if (tactic->apart || (tactic->blas && blas() != nullptr) || !supports_gates(tactic->own)) return false;
    if (gemm.rows > 0) cuda::gemm(stream, device, gemm, tactic->own, own_workspace.data());
    return true;
  }

  // fits: the library rejected the GEMM. Otherwise there is no memory to pad its rows.
  void note_rejection(bool fits, const GemmShape& shape, std::int64_t rows, Rejected& of_shape) {
    of_shape.min_rows = of_shape.count == 0 ? rows : std::min(of_shape.min_rows, rows);
    of_shape.max_rows_seen = std::max(of_shape.max_rows_seen, rows);
    ++of_shape.count;
    rejected.fetch_add(1, std::memory_order_relaxed);
    if (std::exchange(logged[fits ? 0 : 1], true)) return;
    log({LogLevel::warning,
         cat(fits ? "cuBLASLt rejected" : "there is no memory to pad", " a GEMM of ", rows, " rows, ", to_string(shape),
             ", with the algorithm that was chosen for up to ", kBuckets[bucket_of(rows)],
             " rows. A built-in kernel computes it", fits ? ", which is slower for prompts" : ". Please report this",
             ". Later ones are counted in charonia_gemms_rejected_total and listed in the kernel report"),
         "",
         {{"rows", rows}, {"n", shape.n}, {"k", shape.k}}});
  }

  const GemmCandidate& candidate_of(Choices& choices, const Gemm& gemm) {
    auto& tactic = choices.tactics[bucket_of(gemm.rows)];
    if (!tactic) {
      auto largest = gemm;
      largest.rows = kBuckets[bucket_of(gemm.rows)];
      tactic = by_rule(largest);
    }
    return *tactic;
  }

  struct Fastest {
    std::optional<GemmCandidate> tactic;
    bool of_all = true;
  };
  Fastest fastest(Stream& stream, const Gemm& gemm, GemmOperands& operands);
  bool issue_candidate(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic, void* gated_out);
  Gemm lay_out_check(Stream& stream, const Gemm& gemm, GemmOperands& operands);
  bool agrees(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic, GemmOperands& operands);
  bool agrees_with_fallback(Stream& stream, const Gemm& gemm, GemmCandidate& tactic, GemmOperands& operands);
  void require_device(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic, const Error& error) const;
  void note_wrong(const Gemm& gemm, const GemmCandidate& tactic);
  // A GEMM to measure, or with a stored choice to check. bytes: of its operands.
  struct Wanted {
    Gemm gemm;  // with the bucket's rows
    Bucket of;
    bool stored;
    std::size_t bytes;
  };
  Wanted to_measure(const Gemm& gemm, Bucket of) const {
    return {gemm, of, false, std::max(GemmOperands::bytes(device, gemm), GemmOperands::exact_bytes(gemm))};
  }
  std::vector<Wanted> wanted_gemms(std::span<const Gemm> shapes, int max_rows);
  std::optional<GemmOperands> operands_for(std::vector<Wanted>& wanted);
  void warn_of_wrong();
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  DeviceInfo device;
  Options options;
  AutotuneCache memory;
  DeviceMemory own_workspace, blas_workspace;
  DeviceMemory prepared, prepared_scales;  // inputs of quantised weights
  DeviceMemory dequantised;                // dequantised numbers of a part of such a weight, or sums of a part
  std::map<GemmShape, Choices> chosen;
  double seconds_left;
  std::string warning;
  std::size_t wrong = 0;    // candidates with wrong results since the last warning
  std::string named_wrong;  // the first of them
  std::atomic<std::int64_t> rejected = 0;
  std::array<bool, 2> logged{};  // see note_rejection()
};

// Issues a GEMM with a candidate. A separate gate writes to `gated_out`. Returns false if the library rejects the GEMM.
bool GemmRunner::Impl::issue_candidate(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic, void* gated_out) {
  if (tactic.apart) {
    const auto plain = without_gate(gemm);
    if (!issue_candidate(stream, plain, candidate_of(chosen[shape_of(plain)], plain), nullptr)) return false;
    apply_gate(stream, gemm, gated_out);
    return true;
  }
  if (tactic.blas && has_rows(gemm, tactic)) return run_library(stream, gemm, tactic);
  cuda::gemm(stream, device, gemm, tactic.own, own_workspace.data());
  return true;
}

// Returns the GEMM with the operands for agrees(), and computes the result that all candidates must have, in
// operands.second_out(), with zeros behind the columns of each row.
Gemm GemmRunner::Impl::lay_out_check(Stream& stream, const Gemm& gemm, GemmOperands& operands) {
  const auto exact = operands.lay_out_exact(stream, gemm);
  auto plain = without_gate(exact);
  stream.fill_zero(operands.second_out(), operands.out_bytes(), "check of a GEMM");
  if (gemm.gate == Gate::none) plain.out = operands.second_out();
  cuda::gemm(stream, device, plain, reference_tactic(device, plain), own_workspace.data());
  if (gemm.gate != Gate::none) apply_gate(stream, exact, operands.second_out());
  return exact;
}

// Whether a candidate gives the result of the reference kernel, with all rows of `gemm` and with one row less if it
// has the same bucket. The launch in front computes the same GEMM with other inputs, into the same outputs. So it shows
// if the second launch reads too early what the first one writes, such as sums, or does not write. Built-in kernels must
// not write between the columns of a row and the next row; the library gets rows of the stride that its algorithms were
// asked for. gemm: of lay_out_check().
bool GemmRunner::Impl::agrees(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic, GemmOperands& operands) {
  if (tactic.apart) return true;  // both kernels are checked elsewhere
  stream.fill_zero(operands.counter(), sizeof(unsigned), "check of a GEMM");
  unsigned different = 0;
  try {
    for (const auto rows : {gemm.rows, gemm.rows - 1}) {
      if (rows == 0 || bucket_of(rows) != bucket_of(gemm.rows)) break;
      auto part = gemm, front = gemm;
      part.rows = front.rows = rows;
      front.in = GemmOperands::second_row(gemm);
      if (tactic.blas) part.out_stride = front.out_stride = round_up(gemm.n, 8);
      stream.fill_zero(gemm.out, operands.out_bytes(), "check of a GEMM");
      if (!issue_candidate(stream, front, tactic, nullptr) || !issue_candidate(stream, part, tactic, nullptr)) {
        if (rows == gemm.rows) return false;
        break;  // a built-in kernel computes fewer rows that the library rejects
      }
      count_different(stream, part, tactic.blas ? gemm.n : gemm.out_stride, operands.second_out(), gemm.out_stride,
                      operands.counter());
    }
    stream.download(&different, operands.counter(), sizeof different, "check of a GEMM");
    stream.wait("check of a GEMM");
  } catch (const Error& error) {  // such as a stored choice that this device no longer launches
    require_device(stream, gemm, tactic, error);
    return false;
  }
  return different == 0;
}

// agrees() of a stored choice; the built-in fallback of a library's choice is replaced if it is wrong.
bool GemmRunner::Impl::agrees_with_fallback(Stream& stream, const Gemm& gemm, GemmCandidate& tactic,
                                            GemmOperands& operands) {
  if (!agrees(stream, gemm, tactic, operands)) return false;
  if (const GemmCandidate own{.own = tactic.own}; tactic.blas && !agrees(stream, gemm, own, operands)) {
    note_wrong(gemm, own);
    tactic.own = reference_tactic(device, gemm);
  }
  return true;
}

void GemmRunner::Impl::require_device(Stream& stream, const Gemm& gemm, const GemmCandidate& tactic,
                                      const Error& error) const {
  cuda::require_device(stream, name_of(tactic), cat("rows ", gemm.rows, " ", to_string(shape_of(gemm))),
                       !tactic.blas && !tactic.apart && unproven(tactic.own), error);
}

void GemmRunner::Impl::note_wrong(const Gemm& gemm, const GemmCandidate& tactic) {
  ++wrong;
  if (wrong <= kNamedKernels) {
    named_wrong +=
        cat(named_wrong.empty() ? "" : "; ", name_of(tactic), " for rows ", gemm.rows, " ", to_string(shape_of(gemm)));
  }
}

// Returns the fastest of all tactics, or of as many as there is time for, whose results are right.
GemmRunner::Impl::Fastest GemmRunner::Impl::fastest(Stream& stream, const Gemm& gemm, GemmOperands& operands) {
  const auto own = own_tactics(gemm);
  std::vector<GemmCandidate> tactics;
  for (const auto& tactic : own) tactics.push_back({.own = tactic});
  // Alternates between library and built-in tactics, so that both are measured if time runs out.
  auto theirs = library_candidates(gemm);
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    theirs[i].own = own.front();
    const auto at = std::min(2 * i + 1, tactics.size());
    tactics.insert(tactics.begin() + static_cast<std::ptrdiff_t>(at), theirs[i]);
  }
  if (gemm.gate != Gate::none) tactics.push_back({.own = own.front(), .apart = true});
  auto timed = operands.lay_out(stream, device, gemm);
  bool of_all = true;
  for (auto& tactic : tactics) {
    if (seconds_left <= 0) {
      of_all = false;
      break;
    }
    const auto begin = Clock::now();
    bool rejected = false;
    try {
      tactic.microseconds = options.timer(stream, expected_microseconds(gemm), [&](int index) {
        timed.weight = operands.weight(index);
        rejected = !issue_candidate(stream, timed, tactic, operands.second_out()) || rejected;
      });
    } catch (const Error& error) {
      require_device(stream, gemm, tactic, error);
      // A candidate that is rejected here is not chosen, such as a cluster that does not fit on this device. The first
      // built-in tactic is the fallback, so it must work.
      if (!tactic.blas && !tactic.apart && tactic.own == own.front()) throw;
      rejected = true;
    }
    seconds_left -= std::chrono::duration<double>(Clock::now() - begin).count();
    if (rejected) tactic.microseconds = 0;
  }
  std::erase_if(tactics, [](const GemmCandidate& tactic) { return tactic.microseconds == 0; });
  std::ranges::stable_sort(tactics, {}, &GemmCandidate::microseconds);
  const auto begin = Clock::now();
  const auto checked = lay_out_check(stream, gemm, operands);
  std::optional<GemmCandidate> best;
  bool own_agrees = false;
  for (const auto& tactic : tactics) {
    if (best && tactic.blas) continue;
    if (!agrees(stream, checked, tactic, operands)) {
      note_wrong(gemm, tactic);
      continue;
    }
    if (!best) best = tactic;
    if (tactic.blas) continue;
    // The best built-in tactic is the fallback if the library rejects the GEMM.
    best->own = tactic.own;
    own_agrees = true;
    break;
  }
  if (best && !own_agrees) {
    best->own = reference_tactic(device, gemm);
    of_all = false;
  }
  seconds_left -= std::chrono::duration<double>(Clock::now() - begin).count();
  if (!best && !tactics.empty()) return {reference(gemm), false};
  return {best, of_all};
}

// The GEMMs to measure and to check, those of few rows first, because a server spends most of its time in decode steps.
// Sets the stored choices, and choices by rule for the others.
std::vector<GemmRunner::Impl::Wanted> GemmRunner::Impl::wanted_gemms(std::span<const Gemm> shapes, int max_rows) {
  const bool measures = options.timer && seconds_left > 0;
  std::vector<Wanted> wanted;
  std::set<std::pair<GemmShape, Bucket>> seen;
  const auto want = [&](const Gemm& gemm, Bucket of) {
    const auto shape = shape_of(gemm);
    auto& tactic = chosen[shape].tactics[of];
    if (!seen.emplace(shape, of).second || (tactic && tactic->microseconds > 0)) return;
    tactic = memory.find(shape, kBuckets[of]);
    if (tactic && !serves(gemm, *tactic)) tactic.reset();
    if (tactic) {
      wanted.push_back({gemm, of, true, GemmOperands::exact_bytes(gemm)});
    } else {
      choose_by_rule(gemm, tactic);
      if (measures) wanted.push_back(to_measure(gemm, of));
    }
  };
  for (Bucket of = 0; of < kBuckets.size(); ++of) {
    for (auto gemm : shapes) {
      const auto rows = gemm.rows > 0 ? gemm.rows : max_rows;
      if (of > bucket_of(rows)) continue;
      gemm.rows = kBuckets[of];
      gemm.row_capacity = gemm.rows <= kPaddedRows / 2 ? std::min(gemm.row_capacity, kPaddedRows) : 0;
      gemm.in = gemm.out = nullptr;
      gemm.in_stride = round_up(gemm.k, 8);
      gemm.out_stride = round_up(gemm.n, 8);
      if (gemm.quant) {
        gemm.quant->prepared = true;
        if (has_scaled_inputs(gemm)) gemm.quant->row_scales = prepared_scales.as<float>();
        if (is_w8a8(gemm)) gemm.in_stride = prepared_stride(gemm);
      }
      want(without_gate(gemm), of);
      if (gemm.rows <= kGatedRows && can_gate(gemm)) want(gemm, of);
    }
  }
  return wanted;
}

// Allocates memory for the operands. GEMMs that do not fit are removed. A stored choice is then replaced by rule,
// because none is used without a check. Empty if there is no GEMM or no memory.
std::optional<GemmOperands> GemmRunner::Impl::operands_for(std::vector<Wanted>& wanted) {
  for (const auto limit : {std::max(kGemmOperandBytes, std::min(kOperandBytes, free_device_bytes() / 2)),
                           kGemmOperandBytes, std::size_t{0}}) {
    std::size_t bytes = 0;
    std::erase_if(wanted, [&](const Wanted& one) {
      if (one.bytes <= limit) bytes = std::max(bytes, one.bytes);
      if (one.bytes > limit && one.stored) choose_by_rule(one.gemm, chosen[shape_of(one.gemm)].tactics[one.of]);
      return one.bytes > limit;
    });
    if (wanted.empty()) break;
    try {
      return std::optional<GemmOperands>(std::in_place, bytes);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::resource_exhausted) throw;
      log({LogLevel::warning, cat("kernels of GEMMs are chosen by rule instead of measured: ", error.what()), "", {}});
    }
  }
  return std::nullopt;
}

void GemmRunner::Impl::warn_of_wrong() {
  if (wrong == 0) return;
  warning = cat(warning, warning.empty() ? "" : "; ", wrong,
                " kernels gave results that differ from the reference kernel's, and are not used: ", named_wrong,
                wrong > kNamedKernels ? "; and others" : "", ". Please report this");
  wrong = 0;
  named_wrong.clear();
}

void GemmRunner::Impl::prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows) {
  auto unmeasured = wanted_gemms(shapes, max_rows);
  std::vector<Wanted> stored;
  std::ranges::copy_if(unmeasured, std::back_inserter(stored), &Wanted::stored);
  std::erase_if(unmeasured, [](const Wanted& one) { return one.stored; });
  if (prepared_scales.bytes() > 0) {
    const auto scales = measured_scales(prepared_scales.bytes() / sizeof(float));
    stream.upload(prepared_scales.data(), scales.data(), prepared_scales.bytes(), "scales to measure with");
  }
  if (auto operands = operands_for(stored)) {
    for (const auto& one : stored) {
      auto& tactic = chosen[shape_of(one.gemm)].tactics[one.of];
      if (agrees_with_fallback(stream, lay_out_check(stream, one.gemm, *operands), *tactic, *operands)) continue;
      note_wrong(one.gemm, *tactic);
      tactic = reference(one.gemm);
      unmeasured.push_back(to_measure(one.gemm, one.of));
    }
  }
  if (!options.timer || seconds_left <= 0) unmeasured.clear();
  if (auto operands = operands_for(unmeasured)) {
    std::size_t left = unmeasured.size();
    for (const auto& one : unmeasured) {
      if (seconds_left <= 0) break;
      --left;
      const auto shape = shape_of(one.gemm);
      const auto best = fastest(stream, one.gemm, *operands);
      if (best.tactic) chosen[shape].tactics[one.of] = best.tactic;
      if (best.tactic && best.of_all) memory.keep(shape, kBuckets[one.of], *best.tactic);
    }
    if (left > 0) {
      log({LogLevel::info,
           cat("the kernels of ", left, " of ", unmeasured.size(), " GEMMs are chosen by rule, because the ",
               options.seconds, " s for measurements are over (CHARONIA_CUDA_MEASURE_S). The next start measures them"),
           "",
           {}});
    }
  }
  stream.wait("measured GEMMs");
  if (auto failure = memory.save(); !failure.empty()) {
    warning = cat(warning, warning.empty() ? "" : "; ", failure);
  }
  warn_of_wrong();
}

namespace {

GemmRunner::Options default_options(bool reproducible) {
  GemmRunner::Options options;
  options.reproducible = reproducible;
  if (!reproducible) options.blas = load_cublas(options.no_blas);
  options.memory = autotune_cache_path();
  options.timer = make_gemm_timer();
  options.seconds = measure_seconds();
  return options;
}

}  // namespace

void require_device(Stream& stream, const std::string& kernel, const std::string& computation, bool is_unproven,
                    const Error& error) {
  try {
    stream.wait("the device after an error of a kernel");
  } catch (const Error&) {
    throw Error(error.code(),
                cat("the device fails since the kernel '", kernel, "' ran for ", computation, ": ", error.what(),
                    is_unproven ? ". No GPU has run this kernel yet. Set CHARONIA_CUDA_UNPROVEN=0"
                                : ". Please report this. CHARONIA_CUDA_MEASURE_S=0 measures no kernels"));
  }
}

double measure_seconds() {
  const char* const said = std::getenv("CHARONIA_CUDA_MEASURE_S");
  if (said == nullptr) return GemmRunner::Options{}.seconds;
  const auto seconds = parse_number<double>(said);
  if (!seconds || !(*seconds >= 0)) {
    throw Error(ErrorCode::invalid_argument,
                cat("CHARONIA_CUDA_MEASURE_S = '", said, "': it must be a number of seconds, 0 or more"));
  }
  return *seconds;
}

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
  const bool integers = has_integer_codes(gemm);
  if (impl_->blas() == nullptr || (!integers && !can_dequantise(gemm))) return;
  const auto room = integers ? impl_->options.dequantised_bytes
                             : std::min(impl_->options.dequantised_bytes, dequantised_bytes(gemm.n, gemm.k));
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
  constexpr std::array kNames{"stream", "tile", "plain", "bulk", "wgmma"};
  constexpr std::array kSums{"", ", one sum each", ", a cluster"};
  return cat(kNames[static_cast<std::size_t>(tactic.kernel)], " ", tactic.tile_rows, " x ", tactic.tile_columns, ", ",
             tactic.stages, " stages",
             tactic.kernel == GemmTactic::Kernel::bulk ||
                     (tactic.kernel == GemmTactic::Kernel::wgmma && tactic.sums == GemmTactic::Sums::parts)
                 ? cat(", ", tactic.k_blocks, " blocks")
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
      line += name_of(*tactic);
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
      lines.push_back(cat(to_string(shape), ": own kernels computed ", rejected.count, " GEMMs of ", rejected.min_rows,
                          "..", rejected.max_rows_seen, " rows although cuBLASLt was chosen"));
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

double GemmRunner::seconds_left() const { return impl_->seconds_left; }

}  // namespace charonia::cuda
