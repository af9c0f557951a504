#include "ops/cuda/cuda_experts.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/experts.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::internal, "ops::experts: " + what);
}

std::string shape_of(const ops::HostMatrix& m) { return cat("[", m.rows, ", ", m.cols, "]"); }
// The row of gate and up that computes column `column` of down.
std::int64_t of_down_order(const ops::ExpertSource&, std::int64_t column) { return column; }
std::int64_t of_down_order(const ops::QuantExpertSource& expert, std::int64_t column) {
  const auto order = expert.down->order();
  const auto at = static_cast<std::size_t>(column);
  return at < order.size() ? order[at] : column;
}

using RowReader = std::function<MatrixUpload::SourceRow(std::int64_t row)>;
RowReader reader_of(const ops::HostMatrix& matrix, DType, MatrixUpload&) {
  return [&](std::int64_t row) { return MatrixUpload::SourceRow{matrix.row(row), matrix.dtype}; };
}
RowReader reader_of(const ops::QuantSource* source, DType type, MatrixUpload& upload) {
  return [rows = DequantisedReader(*source, type, upload.pool())](std::int64_t row) mutable { return rows.at(row); };
}

// Throws Error(invalid_argument) if a weight differs from the layer's first expert in shape or format, or has a wrong
// order of columns.
void check_weight(const ops::QuantSource& one, std::int64_t rows, std::int64_t cols, const ops::QuantFormat& format) {
  if (one.rows() != rows || one.cols() != cols) {
    throw Error(ErrorCode::invalid_argument, cat(one.name(), " is [", one.rows(), ", ", one.cols(), "], expected [",
                                                 rows, ", ", cols, "] as in the layer's first expert"));
  }
  if (one.format() != format || format.group < 1 || cols % format.group != 0) {
    throw Error(ErrorCode::invalid_argument,
                cat(one.name(), " has the format ", ops::to_string(one.format()), ", the layer's first expert ",
                    ops::to_string(format), ": both must be the same, and rows must be whole groups"));
  }
  const auto order = one.order();
  if (!order.empty() && (std::ssize(order) != cols || std::ranges::any_of(order, [&](std::int32_t feature) {
                           return feature < 0 || feature >= cols;
                         }))) {
    throw Error(ErrorCode::invalid_argument,
                cat(one.name(), ": the order of its columns must have ", cols, " entries below ", cols));
  }
}

std::string shape_of(const ops::Tensor& t) { return cat(to_string(t.dtype), " [", t.rows, ", ", t.cols, "]"); }

}  // namespace

void CudaExperts::check_count(std::size_t count) {
  if (count == 0) throw Error(ErrorCode::invalid_argument, "a layer of experts needs at least one expert");
  if (count > kMaxExperts) {
    throw Error(ErrorCode::unsupported,
                cat("a layer has ", count, " experts, more than the CUDA device supports (", kMaxExperts, ")"));
  }
  count_ = static_cast<int>(count);
}

CudaExperts::CudaExperts(std::span<const ops::QuantExpertSource> experts, DType data, MatrixUpload& upload)
    : type_(data) {
  check_count(experts.size());
  const auto &gates = experts[0].gate->format(), &downs = experts[0].down->format();
  quantised_ = !ops::cuda_dequantises(gates) && !ops::cuda_dequantises(downs);
  hidden_ = experts[0].gate->cols();
  inter_ = experts[0].gate->rows();
  bool ordered = false;
  for (const auto& expert : experts) {
    check_weight(*expert.gate, inter_, hidden_, gates);
    check_weight(*expert.up, inter_, hidden_, gates);
    check_weight(*expert.down, hidden_, inter_, downs);
    if (!std::ranges::equal(expert.gate->order(), expert.up->order())) {
      throw Error(ErrorCode::invalid_argument,
                  cat(expert.up->name(), ": the order of its columns differs from ", expert.gate->name()));
    }
    ordered = ordered || !expert.gate->order().empty();
    gate_up_input_scale_ = std::max({gate_up_input_scale_, expert.gate->input_scale(), expert.up->input_scale()});
    down_input_scale_ = std::max(down_input_scale_, expert.down->input_scale());
  }
  if (!quantised_) {
    load_dense(experts, upload);
    make_biases(experts, upload);
    upload.finish();
    return;
  }
  const auto hidden = round_up(hidden_, kExpertVector), inter = round_up(inter_, kExpertVector);
  quant_gate_up_ = QuantMatrices(gates, std::ssize(experts), 2 * inter, hidden, hidden_, experts[0].gate->name());
  quant_down_ = QuantMatrices(downs, std::ssize(experts), hidden, inter, inter_, experts[0].down->name());
  bytes_ = quant_gate_up_.bytes() + quant_down_.bytes();
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto index = static_cast<std::int64_t>(e);
    // If the columns of down have another order, gate and up compute their rows in that order.
    const auto down_order = experts[e].down->order();
    QuantReader gate(*experts[e].gate, !down_order.empty()), up(*experts[e].up, !down_order.empty());
    QuantReader down(*experts[e].down);
    quant_gate_up_.fill(
        index,
        [&](std::int64_t row) {
          auto of = row / (2 * kExpertVector) * kExpertVector + row % kExpertVector;
          if (of >= inter_) return QuantRow{};
          of = of_down_order(experts[e], of);
          return (row % (2 * kExpertVector) < kExpertVector ? gate : up).at(of);
        },
        upload);
    quant_down_.fill(index, [&](std::int64_t row) { return row < hidden_ ? down.at(row) : QuantRow{}; }, upload);
  }
  if (ordered) {
    order_ = DeviceMemory(static_cast<std::size_t>(count_ * hidden_) * sizeof(std::int32_t), "the order of columns");
    const auto row_bytes = static_cast<std::size_t>(hidden_) * sizeof(std::int32_t);
    upload.in_chunks(order_.as<std::byte>(), row_bytes, count_,
                     [&](std::byte* chunk, std::int64_t first, std::int64_t n) {
                       auto* to = reinterpret_cast<std::int32_t*>(chunk);
                       for (std::int64_t e = first; e < first + n; ++e, to += hidden_) {
                         const auto order = experts[static_cast<std::size_t>(e)].gate->order();
                         std::iota(to, to + hidden_, 0);
                         std::ranges::copy(order, to);
                       }
                     });
    bytes_ += order_.bytes();
  }
  make_biases(experts, upload);
  upload.finish();
}

std::optional<QuantWeight> CudaExperts::gate_up_quant() const {
  if (!quantised_) return std::nullopt;
  auto quant = quant_gate_up_.weight();
  quant.input_scale = gate_up_input_scale_;
  quant.order = order_.as<std::int32_t>();
  return quant;
}

std::optional<QuantWeight> CudaExperts::down_quant() const {
  if (!quantised_) return std::nullopt;
  auto quant = quant_down_.weight();
  quant.input_scale = down_input_scale_;
  return quant;
}

ExpertGemm CudaExperts::gate_up_gemm() const {
  const auto hidden = round_up(hidden_, kExpertVector);
  return {.type = type_,
          .in_stride = hidden,
          .weight = gate_up(),
          .bias = gate_up_bias(),
          .n = 2 * round_up(inter_, kExpertVector),
          .k = hidden,
          .gated = true,
          .quant = gate_up_quant()};
}

ExpertGemm CudaExperts::down_gemm() const {
  const auto inter = round_up(inter_, kExpertVector);
  return {.type = type_,
          .in_stride = inter,
          .weight = down(),
          .bias = down_bias(),
          .n = round_up(hidden_, kExpertVector),
          .k = inter,
          .quant = down_quant()};
}

RouteParams route_params(const ExpertsWorkspace& space, void* memory, int experts, const ops::RouterParams& how,
                         int tile_rows) {
  const auto part = [&]<class T>(std::size_t offset, T*) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory) + offset);
  };
  constexpr std::int32_t* kIntegers = nullptr;
  return {.rows = static_cast<int>(space.assignments / how.top_k),
          .experts = experts,
          .how = how,
          .tile_rows = tile_rows,
          .num_tiles = static_cast<int>(max_expert_tiles(space.assignments, experts, tile_rows)),
          .chosen = part(space.chosen, kIntegers),
          .weights = part(space.weights, static_cast<float*>(nullptr)),
          .places = part(space.places, kIntegers),
          .rows_of = part(space.rows_of, kIntegers),
          .tiles = part(space.tiles, static_cast<ExpertTile*>(nullptr))};
}

CudaExperts::CudaExperts(std::span<const ops::ExpertSource> experts, DType weight, MatrixUpload& upload)
    : type_(weight) {
  check_count(experts.size());
  hidden_ = experts[0].gate.cols;
  inter_ = experts[0].gate.rows;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto& [gate, up, down, bias] = experts[e];
    if (gate.rows != inter_ || gate.cols != hidden_ || up.rows != inter_ || up.cols != hidden_ ||
        down.rows != hidden_ || down.cols != inter_) {
      throw Error(ErrorCode::invalid_argument,
                  cat("expert ", e, " has gate ", shape_of(gate), ", up ", shape_of(up), " and down ", shape_of(down),
                      ": gate and up must be [", inter_, ", ", hidden_, "], down the transposed shape"));
    }
  }
  load_dense(experts, upload);
  make_biases(experts, upload);
  upload.finish();
}

template <class Source>
void CudaExperts::load_dense(std::span<const Source> experts, MatrixUpload& upload) {
  const auto hidden = round_up(hidden_, kExpertVector), inter = round_up(inter_, kExpertVector);
  const auto matrix = static_cast<std::size_t>(hidden * inter) * size_of(type_);
  bytes_ = 3 * matrix * experts.size();
  const auto what = cat("the experts of a layer, ", experts.size(), " of [", inter_, ", ", hidden_, "]");
  gate_up_ = DeviceMemory(2 * matrix * experts.size(), what);
  down_ = DeviceMemory(matrix * experts.size(), what);
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto reader = [&](const auto& matrix) { return reader_of(matrix, type_, upload); };
    const auto gate = reader(experts[e].gate), up = reader(experts[e].up), down = reader(experts[e].down);
    upload.copy_rows(gate_up_.as<std::byte>() + 2 * matrix * e, type_, hidden, 2 * inter, hidden_,
                     [&](std::int64_t row) -> MatrixUpload::SourceRow {
                       const auto of = row / (2 * kExpertVector) * kExpertVector + row % kExpertVector;
                       if (of >= inter_) return {};
                       return row % (2 * kExpertVector) < kExpertVector ? gate(of) : up(of);
                     });
    upload.copy_rows(down_.as<std::byte>() + matrix * e, type_, inter, hidden, inter_,
                     [&](std::int64_t row) { return row < hidden_ ? down(row) : MatrixUpload::SourceRow{}; });
  }
}

template <class Source>
void CudaExperts::make_biases(std::span<const Source> experts, MatrixUpload& upload) {
  const auto has = [](const ops::HostMatrix& bias) { return bias.data != nullptr; };
  const auto& first = experts[0].bias;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto& bias = experts[e].bias;
    const auto wrong = [&](const ops::HostMatrix& one, bool wanted, std::int64_t rows) {
      return has(one) != wanted || (wanted && (one.rows != rows || one.cols != 1));
    };
    if (wrong(bias.gate, has(first.gate), inter_) || wrong(bias.up, has(first.up), inter_) ||
        wrong(bias.down, has(first.down), hidden_)) {
      throw Error(ErrorCode::invalid_argument,
                  cat("expert ", e, " has biases of gate ", shape_of(bias.gate), ", up ", shape_of(bias.up),
                      " and down ", shape_of(bias.down),
                      ": expected one element per row, as in the layer's first expert"));
    }
  }
  // A row of a bias is one element, so rows are copied like a matrix of one column.
  const auto copy = [&](DeviceMemory& to, std::int64_t rows, auto row_of) {
    to = DeviceMemory(experts.size() * static_cast<std::size_t>(rows) * sizeof(float), "the experts' biases");
    upload.copy_rows(to.as<std::byte>(), DType::f32, 1, std::ssize(experts) * rows, 1, [&](std::int64_t row) {
      return row_of(experts[static_cast<std::size_t>(row / rows)], row % rows);
    });
    bytes_ += to.bytes();
  };
  const auto element = [](const ops::HostMatrix& bias, std::int64_t row) -> MatrixUpload::SourceRow {
    return {row < bias.rows ? bias.row(row) : nullptr, bias.dtype};
  };
  if (has(first.gate) || has(first.up)) {
    copy(gate_up_bias_, 2 * round_up(inter_, kExpertVector), [&](const Source& expert, std::int64_t row) {
      const auto of = row / (2 * kExpertVector) * kExpertVector + row % kExpertVector;
      const bool is_gate = row % (2 * kExpertVector) < kExpertVector;
      return element(is_gate ? expert.bias.gate : expert.bias.up, quantised_ ? of_down_order(expert, of) : of);
    });
  }
  if (has(first.down)) {
    copy(down_bias_, round_up(hidden_, kExpertVector),
         [&](const Source& expert, std::int64_t row) { return element(expert.bias.down, row); });
  }
}

std::unique_ptr<ops::Experts> CudaOps::make_experts(std::span<const ops::ExpertSource> experts, DType weight) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaExperts>(experts, weight, weights_upload());
}

std::unique_ptr<ops::Experts> CudaOps::make_quantised_experts(std::span<const ops::QuantExpertSource> experts,
                                                              DType data) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaExperts>(experts, data, weights_upload());
}

std::size_t CudaOps::experts_scratch_bytes(const ops::ExpertsShape& shape, std::int64_t rows) const {
  return ExpertsWorkspace(shape, rows).bytes;
}

namespace {

void check_experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router, const CudaExperts& w,
                   const ops::RouterParams& how, const ops::Tensor& shared) {
  require(in.dtype == w.type() && out.dtype == w.type() && router.dtype == DType::f32,
          cat("in ", shape_of(in), " and out ", shape_of(out), " must have the weights' type ", to_string(w.type()),
              ", and router ", shape_of(router), " must be fp32"));
  require(shared.data == nullptr || (shared.dtype == out.dtype && shared.rows == out.rows && shared.cols == out.cols),
          cat("the shared expert's output ", shape_of(shared), " must have the type and shape of out ", shape_of(out)));
  require(in.cols == w.hidden() && out.cols == w.hidden() &&
              (router.cols == w.count() || router.cols == 2 * w.count()) && in.rows == out.rows &&
              router.rows == in.rows,
          cat("in ", shape_of(in), ", out ", shape_of(out), ", router ", shape_of(router), " and ", w.count(),
              " experts of ", w.hidden(), " by ", w.inter(), " do not fit together"));
  require(how.fits(w.count()), cat("top_k ", how.top_k, " out of ", how.top_groups, " of ", how.groups,
                                   " groups does not fit ", w.count(), " experts"));
  if (how.top_k > kMaxExpertsOfRow) {
    throw Error(ErrorCode::unsupported, cat("num_experts_per_tok = ", how.top_k,
                                            " is more than the CUDA device supports (", kMaxExpertsOfRow, ")"));
  }
}

// One mixture-of-experts layer: its operations in the order of their calls. Between them the scratch memory holds the
// parts of ExpertsWorkspace.
class ExpertsRun {
 public:
  ExpertsRun(Stream& stream, const DeviceInfo& device, const CudaExperts& weights, std::int64_t rows,
             const ops::RouterParams& how, void* scratch, ExpertKernels::Use wgmma)
      : stream_(stream),
        device_(device),
        weights_(weights),
        space_({weights.count(), how.top_k, weights.hidden(), weights.inter(), weights.type()}, rows),
        memory_(static_cast<std::byte*>(scratch)),
        gate_up_(weights.gate_up_quant()),
        down_(weights.down_quant()),
        wgmma_(wgmma) {
    const auto type = weights.type();
    const int tile_rows =
        gate_up_ ? quant_expert_tile_rows(type, {gate_up_->format, space_.hidden}, {down_->format, space_.inter},
                                          space_.assignments, weights.count())
                 : expert_tile_rows(type, space_.assignments, weights.count());
    route_ = route_params(space_, memory_, weights.count(), how, tile_rows);
  }

  // real_rows: see RouteParams.
  void route(const ops::Tensor& router, const std::int32_t* real_rows) {
    route_.logits = static_cast<const float*>(router.data);
    route_.stride = router.stride;
    route_.in_halves = router.cols > weights_.count();
    route_.real_rows = real_rows;
    route_rows(stream_, route_);
  }

  void gate_and_up(const ops::Tensor& in, ops::Activation activation) {
    const bool prepares = gate_up_ && (has_integer_inputs(gate_up_->format) || gate_up_->order != nullptr);
    const bool by_place = gate_up_ && gate_up_->order != nullptr;  // each expert has its own order
    const bool readable = aligned(in.data, in.stride, in.dtype) && in.cols == space_.hidden && !prepares;
    auto quant = gate_up_;
    // The outputs of down are not needed yet.
    auto* const padded_in = memory_ + (by_place ? space_.down : space_.in);
    if (prepares) {
      quant = prepare_expert_inputs(stream_, weights_.type(), *gate_up_,
                                    {.in = in.data,
                                     .in_stride = in.stride,
                                     .rows = in.rows,
                                     .cols = in.cols,
                                     .out = padded_in,
                                     .padded = space_.hidden,
                                     .scales = part<float>(space_.in_scales),
                                     .tiles = by_place ? route_.tiles : nullptr,
                                     .rows_of = route_.rows_of,
                                     .num_tiles = route_.num_tiles,
                                     .tile_rows = route_.tile_rows});
    } else if (!readable) {
      pad_rows(stream_, in, padded_in, space_.hidden);
    }
    auto gemm = weights_.gate_up_gemm();
    if (readable) gemm.in_stride = in.stride;
    gemm.rows_of = by_place ? nullptr : route_.rows_of;
    gemm.activation = activation;
    gemm.quant = quant;
    gemm.wgmma = wgmma_.gate_up;
    multiply(gemm, readable ? in.data : padded_in, memory_ + space_.gated);
  }

  void down() {
    auto* const gated = memory_ + space_.gated;
    auto quant = down_;
    if (down_ && has_integer_inputs(down_->format)) {
      quant = prepare_expert_inputs(stream_, weights_.type(), *down_,
                                    {.in = gated,
                                     .in_stride = space_.inter,
                                     .rows = space_.assignments,
                                     .cols = space_.inter,
                                     .out = gated,
                                     .padded = space_.inter,
                                     .scales = part<float>(space_.gated_scales)});
    }
    auto gemm = weights_.down_gemm();
    gemm.quant = quant;
    gemm.wgmma = wgmma_.down;
    multiply(gemm, gated, memory_ + space_.down);
  }

  void add(const ops::Tensor& out, const ops::SharedExpert& shared) {
    add_experts(stream_, {.out = out,
                          .type = weights_.type(),
                          .down = memory_ + space_.down,
                          .padded = space_.hidden,
                          .places = route_.places,
                          .weights = route_.weights,
                          .top_k = route_.how.top_k,
                          .shared = shared});
  }

 private:
  template <class T>
  T* part(std::size_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }

  void multiply(ExpertGemm& gemm, const void* in, void* out) {
    gemm.in = in;
    gemm.out = out;
    gemm.tiles = route_.tiles;
    gemm.num_tiles = route_.num_tiles;
    gemm.tile_rows = route_.tile_rows;
    multiply_experts(stream_, device_, gemm);
  }

  Stream& stream_;
  const DeviceInfo& device_;
  const CudaExperts& weights_;
  ExpertsWorkspace space_;
  std::byte* memory_;
  std::optional<QuantWeight> gate_up_, down_;  // empty: the weights are not quantised
  ExpertKernels::Use wgmma_;
  RouteParams route_;
};

}  // namespace

void CudaOps::experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router,
                      const ops::Experts& weights, const ops::RouterParams& how, ops::Activation activation,
                      void* scratch, const ops::SharedExpert& shared) {
  const auto& w = static_cast<const CudaExperts&>(weights);
  check_experts(out, in, router, w, how, shared.out);
  if (tracing_) {
    if (w.gate_up_quant()) ExpertKernels::add(trace_.experts, w, how.top_k, activation);
    return;
  }
  if (in.rows == 0) return;
  // The padding rows of a step must not activate experts.
  const auto* const real_rows = begun_.any && in.rows == begun_.capacity.rows
                                    ? uploaded<std::int32_t>(begun_.layout.counts) + kCountOfRows
                                    : nullptr;
  ExpertsRun run(stream_, device_, w, in.rows, how, scratch, experts_.use(w, how.top_k, in.rows));
  run.route(router, real_rows);
  run.gate_and_up(in, activation);
  run.down();
  run.add(out, shared);
}

}  // namespace charonia::cuda
