#include "ops/cuda/cuda_experts.h"

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/experts.h"

namespace charonia::cuda {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::internal, "ops::experts: " + what);
}

std::string shape_of(const ops::HostMatrix& m) { return cat("[", m.rows, ", ", m.cols, "]"); }
std::string shape_of(const ops::Tensor& t) { return cat(to_string(t.dtype), " [", t.rows, ", ", t.cols, "]"); }

bool aligned(const ops::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         tensor.stride * static_cast<std::int64_t>(size_of(tensor.dtype)) % 16 == 0;
}

}  // namespace

CudaExperts::CudaExperts(std::span<const ops::ExpertSource> experts, DType weight, MatrixUpload& upload)
    : type_(weight) {
  if (experts.empty()) throw Error(ErrorCode::invalid_argument, "a layer of experts needs at least one expert");
  if (experts.size() > kMaxExperts) {
    throw Error(ErrorCode::unsupported,
                cat("a layer of ", experts.size(), " experts; on CUDA it may have up to ", kMaxExperts));
  }
  count_ = static_cast<int>(experts.size());
  hidden_ = experts[0].gate.cols;
  inter_ = experts[0].gate.rows;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto& [gate, up, down] = experts[e];
    if (gate.rows != inter_ || gate.cols != hidden_ || up.rows != inter_ || up.cols != hidden_ ||
        down.rows != hidden_ || down.cols != inter_) {
      throw Error(ErrorCode::invalid_argument,
                  cat("expert ", e, " has gate ", shape_of(gate), ", up ", shape_of(up), " and down ", shape_of(down),
                      ": gate and up must be [", inter_, ", ", hidden_, "], down the other way round"));
    }
  }
  const auto hidden = round_up(hidden_, kExpertVector), inter = round_up(inter_, kExpertVector);
  const auto matrix = static_cast<std::size_t>(hidden * inter) * size_of(type_);
  bytes_ = 3 * matrix * experts.size();
  const auto what = cat("the experts of a layer, ", experts.size(), " of [", inter_, ", ", hidden_, "]");
  gate_up_ = DeviceMemory(2 * matrix * experts.size(), what);
  down_ = DeviceMemory(matrix * experts.size(), what);
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto& source = experts[e];
    upload.copy_rows(gate_up_.as<std::byte>() + 2 * matrix * e, type_, hidden, 2 * inter, hidden_,
                     [&](std::int64_t row) -> MatrixUpload::SourceRow {
                       const auto of = row / (2 * kExpertVector) * kExpertVector + row % kExpertVector;
                       const auto& part = row % (2 * kExpertVector) < kExpertVector ? source.gate : source.up;
                       return {of < inter_ ? part.row(of) : nullptr, part.dtype};
                     });
    upload.copy_rows(down_.as<std::byte>() + matrix * e, type_, inter, hidden, inter_,
                     [&](std::int64_t row) -> MatrixUpload::SourceRow {
                       return {row < hidden_ ? source.down.row(row) : nullptr, source.down.dtype};
                     });
  }
  upload.finish();
}

std::unique_ptr<ops::Experts> CudaOps::make_experts(std::span<const ops::ExpertSource> experts, DType weight) {
  const OnDevice on(device_.index);
  if (!weights_upload_) weights_upload_ = std::make_unique<MatrixUpload>(stream_);
  return std::make_unique<CudaExperts>(experts, weight, *weights_upload_);
}

std::size_t CudaOps::experts_scratch_bytes(const ops::ExpertsShape& shape, std::int64_t rows) const {
  return ExpertsWorkspace(shape, rows).bytes;
}

void CudaOps::experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router,
                      const ops::Experts& weights, const ops::RouterParams& how, ops::Activation activation,
                      void* scratch) {
  const auto& w = static_cast<const CudaExperts&>(weights);
  require(in.dtype == w.type() && out.dtype == w.type() && router.dtype == DType::f32,
          cat("in ", shape_of(in), " and out ", shape_of(out), " must be of the weights' type ", to_string(w.type()),
              ", router ", shape_of(router), " fp32"));
  require(in.cols == w.hidden() && out.cols == w.hidden() && router.cols == w.count() && in.rows == out.rows &&
              router.rows == in.rows,
          cat("in ", shape_of(in), ", out ", shape_of(out), ", router ", shape_of(router), " and ", w.count(),
              " experts of ", w.hidden(), " by ", w.inter(), " do not fit together"));
  require(how.top_k >= 1 && how.top_k <= w.count(), cat("top_k ", how.top_k, " must be in [1, ", w.count(), "]"));
  if (how.top_k > kMaxExpertsOfRow) {
    throw Error(ErrorCode::unsupported,
                cat("num_experts_per_tok = ", how.top_k, "; on CUDA it may be up to ", kMaxExpertsOfRow));
  }
  if (tracing_ || in.rows == 0) return;

  const ExpertsWorkspace workspace({w.count(), how.top_k, w.hidden(), w.inter(), w.type()}, in.rows);
  auto* const memory = static_cast<std::byte*>(scratch);
  const auto ints = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(memory + offset); };
  const int tile_rows = expert_tile_rows(w.type(), workspace.assignments, w.count());
  RouteParams route{.logits = static_cast<const float*>(router.data),
                    .stride = router.stride,
                    .rows = static_cast<int>(in.rows),
                    .experts = w.count(),
                    .top_k = how.top_k,
                    .tile_rows = tile_rows,
                    .num_tiles = static_cast<int>(max_expert_tiles(workspace.assignments, w.count(), tile_rows)),
                    .renormalize = how.renormalize,
                    // A step's padding must not bring experts of its own.
                    .real_rows = begun_.any && in.rows == begun_.capacity.rows
                                     ? uploaded<std::int32_t>(begun_.layout.counts) + kCountOfRows
                                     : nullptr,
                    .chosen = ints(workspace.chosen),
                    .weights = reinterpret_cast<float*>(memory + workspace.weights),
                    .places = ints(workspace.places),
                    .rows_of = ints(workspace.rows_of),
                    .tiles = reinterpret_cast<ExpertTile*>(memory + workspace.tiles)};
  route_rows(stream_, route);
  const bool readable = aligned(in) && in.cols == workspace.hidden;
  if (!readable) pad_rows(stream_, in, memory + workspace.in, workspace.hidden);
  const auto multiply = [&](ExpertGemm gemm) {
    gemm.type = w.type();
    gemm.tiles = route.tiles;
    gemm.num_tiles = route.num_tiles;
    gemm.tile_rows = tile_rows;
    multiply_experts(stream_, device_, gemm);
  };
  multiply({.in = readable ? in.data : memory + workspace.in,
            .in_stride = readable ? in.stride : workspace.hidden,
            .rows_of = route.rows_of,
            .weight = w.gate_up(),
            .out = memory + workspace.gated,
            .n = 2 * workspace.inter,
            .k = workspace.hidden,
            .gated = true,
            .activation = activation});
  multiply({.in = memory + workspace.gated,
            .in_stride = workspace.inter,
            .weight = w.down(),
            .out = memory + workspace.down,
            .n = workspace.hidden,
            .k = workspace.inter});
  add_experts(stream_, {.out = out,
                        .type = w.type(),
                        .down = memory + workspace.down,
                        .padded = workspace.hidden,
                        .places = route.places,
                        .weights = route.weights,
                        .top_k = how.top_k});
}

}  // namespace charonia::cuda
