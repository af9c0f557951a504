#include "ops/cuda/device/tensor_map.h"

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {

void check(const TensorBox& box) {
  const auto fail = [](auto... text) { throw Error(ErrorCode::internal, cat("a tensor map: ", text...)); };
  constexpr std::int64_t kMaxSize = std::int64_t{1} << 32, kMaxStride = std::int64_t{1} << 40;
  constexpr int kMaxBox = 256;
  if (box.type != DType::bf16 && box.type != DType::f16 && box.type != DType::i8)
    fail("elements of ", to_string(box.type), "; they are bf16, f16 or i8");
  if (box.rank < 2 || box.rank > TensorBox::kMaxRank) fail(box.rank, " dimensions; it has 2 to ", TensorBox::kMaxRank);
  if (reinterpret_cast<std::uintptr_t>(box.data) % 16 != 0) fail("the data is not aligned to 16 bytes");
  for (int i = 0; i < box.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (box.sizes[at] < 1 || box.sizes[at] > kMaxSize)
      fail("dimension ", i, " has ", box.sizes[at], " elements; 1 to 2^32");
    if (box.box[at] < 1 || box.box[at] > kMaxBox)
      fail("a box of ", box.box[at], " in dimension ", i, "; 1 to ", kMaxBox);
    if (i > 0 && (box.strides[at] < 1 || box.strides[at] % 16 != 0 || box.strides[at] >= kMaxStride)) {
      fail("dimension ", i, " has a stride of ", box.strides[at], " bytes; it must be a multiple of 16 below 2^40");
    }
  }
  const int width = box.box[0] * static_cast<int>(size_of(box.type)), wanted = static_cast<int>(box.swizzle);
  if (width % 16 != 0) fail("a box of ", width, " bytes in dimension 0; it must be a multiple of 16");
  if (wanted != 0 && width != wanted) fail("a box of ", width, " bytes in dimension 0; the swizzle has ", wanted);
}

}  // namespace charonia::cuda
