// LoRA adapters on a CUDA device: their slots, and the rows of a step that use them.
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/kernels/low_rank.h"

namespace charonia::cuda {
namespace {

constexpr std::int64_t kSlotAlignment = 256;

// Page-locked if the system has enough of such memory.
class HostBuffer : public ops::Buffer {
 public:
  explicit HostBuffer(std::size_t bytes) {
    try {
      pinned_ = PinnedMemory(bytes);
      data_ = pinned_.data();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::resource_exhausted) throw;
      plain_.resize(bytes);
      data_ = plain_.data();
    }
    bytes_ = bytes;
  }

 private:
  PinnedMemory pinned_;
  std::vector<std::byte> plain_;
};

}  // namespace

void CudaOps::make_adapter_slots(const ops::AdapterSlots& slots) {
  const OnDevice on(device_.index);
  adapter_slots_ = slots;
  const auto each = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(slots.bytes), kSlotAlignment));
  adapters_ = DeviceMemory(static_cast<std::size_t>(slots.count) * each, "LoRA adapters");
}

std::unique_ptr<ops::Buffer> CudaOps::allocate_host(std::size_t bytes) {
  const OnDevice on(device_.index);
  return std::make_unique<HostBuffer>(bytes);
}

void CudaOps::fill_adapter_slot(int slot, const ops::Buffer& image) {
  if (slot < 0 || slot >= adapter_slots_.count || image.bytes() > slot_bytes()) {
    throw Error(ErrorCode::internal, cat("ops::fill_adapter_slot: ", image.bytes(), " bytes for slot ", slot, " of ",
                                         adapter_slots_.count, " slots with ", adapter_slots_.bytes, " bytes"));
  }
  const OnDevice on(device_.index);
  auto* const to = adapters_.as<std::byte>() + static_cast<std::size_t>(slot) * slot_bytes();
  stream_.upload(to, image.data(), image.bytes(), "upload of an adapter");
}

void CudaOps::make_adapter_workspace(const ops::StepLimits& limits) {
  adapter_workspace_ = {};
  if (adapter_slots_.count == 0) return;
  const auto bytes = low_rank_workspace_bytes(adapter_slots_, limits.max_rows, trace_.f32_adapters);
  if (bytes > 0) adapter_workspace_ = DeviceMemory(bytes, "products of adapters");
  adapter_batch_.rows.reserve(static_cast<std::size_t>(limits.max_rows));
}

void CudaOps::group_adapters(const ops::StepInput& input) {
  const auto sequences = input.attention.query_start.empty() ? 0 : input.attention.query_start.size() - 1;
  for (const auto slot : input.adapters) {
    if (slot >= -1 && slot < adapter_slots_.count && input.adapters.size() == sequences) continue;
    throw Error(ErrorCode::internal, cat("ops::begin_step: slot ", slot, " of ", adapter_slots_.count, " slots, and ",
                                         input.adapters.size(), " slots for ", sequences, " sequences"));
  }
  group_by_adapter(input, adapter_batch_);
  begun_.kind.adapters = !adapter_batch_.rows.empty();
}

void CudaOps::add_adapters(const ops::Tensor& out, const ops::Tensor& in, int weight) {
  const auto& weights = adapter_slots_.weights;
  if (weight < 0 || weight >= std::ssize(weights) || in.cols != weights[static_cast<std::size_t>(weight)].in_features ||
      in.rows != out.rows || (out.dtype != in.dtype && out.dtype != DType::f32)) {
    throw Error(ErrorCode::internal, cat("ops::add_adapters: in ", to_string(in.dtype), " [", in.rows, ", ", in.cols,
                                         "] and out ", to_string(out.dtype), " [", out.rows, ", ", out.cols,
                                         "] do not fit weight ", weight, " of ", weights.size()));
  }
  if (tracing_) {
    trace_.f32_adapters = in.dtype == DType::f32;
    return;
  }
  const auto& shape = weights[static_cast<std::size_t>(weight)];
  if (shape.ranks == 0) return;  // no module of an adapter
  require_step("add_adapters", in.rows, begun_.capacity.rows);
  const auto& at = begun_.layout;
  cuda::add_adapters(stream_, out, in,
                     {.items = uploaded<AdapterItem>(at.adapter_items),
                      .rows = uploaded<std::int32_t>(at.adapter_rows),
                      .max_items = begun_.capacity.adapter_items,
                      .max_rows = begun_.capacity.adapter_rows,
                      .slots = adapters_.as<std::byte>(),
                      .slot_bytes = static_cast<std::int64_t>(slot_bytes()),
                      .weight = weight,
                      .shape = shape,
                      .workspace = adapter_workspace_.as<float>()});
}

}  // namespace charonia::cuda
