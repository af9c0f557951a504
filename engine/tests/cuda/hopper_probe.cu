#include "cuda/hopper_probe.h"

#include "charonia/error.h"
#include "ops/cuda/device/hopper.h"
#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kSlots = 3;

// One warp copies, another one reads.
CHARONIA_KERNEL(2 * kWarp, 1) void bulk_kernel(const BulkProbe p) {
  CHARONIA_SHARED(std::uint64_t, full, [kSlots]);
  CHARONIA_SHARED(std::uint64_t, empty, [kSlots]);
  auto* const ring = reinterpret_cast<float*>(swizzled_shared());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kWarp);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_trigger();
  dependency_wait();
  const int chunks = p.count / kBulkChunk;
  constexpr int kBytes = kBulkChunk * static_cast<int>(sizeof(float));
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int slot = chunk % kSlots, parity = chunk / kSlots % 2;
    if (warp_id() == 0) {
      if (lane_id() == 0) {
        barrier_wait(empty + slot, 1 - parity);
        barrier_arrive_expect(full + slot, kBytes);
        copy_bulk(ring + slot * kBulkChunk, p.in + chunk * kBulkChunk, kBytes, full + slot);
      }
    } else {
      barrier_wait(full + slot, parity);
      for (int i = lane_id(); i < kBulkChunk; i += kWarp) {
        p.out[chunk * kBulkChunk + i] = ring[slot * kBulkChunk + i] + 1;
      }
      barrier_arrive(empty + slot);
    }
  }
}

// Initialises a barrier for one arrival, and waits for the kernel in front.
CHARONIA_DEVICE void begin(std::uint64_t* full) {
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_trigger();
  dependency_wait();
}

template <int rank>
CHARONIA_KERNEL(128, 1)
void box_kernel(CHARONIA_GRID_CONSTANT const BoxProbe p) {
  CHARONIA_SHARED(std::uint64_t, full, [1]);
  unsigned char* const box = swizzled_shared();
  begin(full);
  if (threadIdx.x == 0) {
    int at[rank];
    CHARONIA_UNROLL
    for (int i = 0; i < rank; ++i) at[i] = p.at[i];
    barrier_arrive_expect(full, p.bytes);
    copy_box(box, p.map, at, full);
  }
  barrier_wait(full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < p.bytes; i += static_cast<int>(blockDim.x)) p.out[i] = box[i];
}

// Registers of operand a of 16 rows from `row` on, for 16 elements from k on.
template <class T>
CHARONIA_DEVICE void load_factor(std::uint32_t (&to)[4], const void* a, int row, int k) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  CHARONIA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto* const from = static_cast<const T*>(a) + (row + g + i % 2 * 8) * kProbeK + k + 2 * t + i / 2 * 8;
    to[i] = load_readonly(reinterpret_cast<const unsigned*>(from));
  }
}

// The place of sum i of a lane.
template <class Sum, int n>
CHARONIA_DEVICE Sum& sum_at(const ProductProbe& p, int row, int i) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  return static_cast<Sum*>(p.out)[(row + g + i % 4 / 2 * 8) * n + i / 4 * 8 + 2 * t + i % 2];
}
template <int n, class Sum>
CHARONIA_DEVICE void store_sums(const ProductProbe& p, const Sum (&d)[n / 2], int row) {
  CHARONIA_UNROLL
  for (int i = 0; i < n / 2; ++i) sum_at<Sum, n>(p, row, i) = d[i];
}

constexpr int kWarpgroup = 128;

// One warpgroup copies, the other one multiplies.
template <class T, int n, Factor factor>
CHARONIA_KERNEL(2 * kWarpgroup, 1)
void wgmma_kernel(CHARONIA_GRID_CONSTANT const ProductProbe p) {
  CHARONIA_SHARED(std::uint64_t, full, [1]);
  constexpr int kRowBytes = kProbeK * 2;
  constexpr bool kTransposed = factor == Factor::registers_transposed;
  constexpr bool kShared = factor == Factor::shared || factor == Factor::written;
  unsigned char* const a = swizzled_shared();
  unsigned char* const b = a + kProbeM * kRowBytes;
  const int width = p.swizzle == Swizzle::none ? 16 : static_cast<int>(p.swizzle);
  begin(full);
  if constexpr (factor == Factor::written) {
    constexpr int kPieces = kRowBytes / 16;
    for (int i = static_cast<int>(threadIdx.x); i < kProbeM * kPieces; i += 2 * kWarpgroup) {
      const int row = i / kPieces, at = i % kPieces * 16;
      const auto to = swizzled(static_cast<std::uint32_t>(row * width + at % width), p.swizzle);
      const auto* const from = static_cast<const unsigned char*>(p.a) + row * kRowBytes + at;
      *reinterpret_cast<uint4*>(a + at / width * width * kProbeM + to) =
          load_readonly(reinterpret_cast<const uint4*>(from));
    }
    async_fence();
    __syncthreads();
  }
  if (threadIdx.x < kWarpgroup) {
    leave_registers<40>();
    if (threadIdx.x == 0) {
      constexpr int kA = factor == Factor::shared ? kProbeM : 0;
      barrier_arrive_expect(full, (kA + n) * kRowBytes);
      if constexpr (factor == Factor::shared) {
        for (int at = 0; at < kRowBytes; at += width) copy_box(a + at * kProbeM, p.a_map, {at / 2, 0}, full);
      }
      for (int at = 0; at < (kTransposed ? n * 2 : kRowBytes); at += width) {
        copy_box(b + at * (kTransposed ? kProbeK : n), p.b_map, {at / 2, 0}, full);
      }
    }
  } else {
    take_registers<232>();
    const int row = warp_id() % 4 * 16;
    SumType<T> d[n / 2];
    CHARONIA_UNROLL
    for (int i = 0; i < n / 2; ++i) d[i] = sum_at<SumType<T>, n>(p, row, i);
    std::uint32_t registers[kProbeK / 16][4];
    if constexpr (!kShared) {
      CHARONIA_UNROLL
      for (int i = 0; i < kProbeK / 16; ++i) load_factor<T>(registers[i], p.a, row, 16 * i);
    }
    // The part of an operand of `rows` rows for 16 elements of K.
    const auto part = [&](unsigned char* operand, int rows, int i) {
      const int at = 32 * i;
      return matrix_descriptor(operand + at / width * rows * width + at % width, p.swizzle, 8 * width,
                               p.swizzle == Swizzle::none ? rows * width : 16);
    };
    barrier_wait(full, 0);
    wgmma_fence();
    CHARONIA_UNROLL
    for (int i = 0; i < kProbeK / 16; ++i) {
      const auto of_b =
          kTransposed ? matrix_descriptor(b + 16 * i * width, p.swizzle, 8 * width, kProbeK * width) : part(b, n, i);
      if constexpr (kShared) {
        wgmma<T, n, kTransposed>(d, part(a, kProbeM, i), of_b, i > 0 || p.add);
      } else {
        wgmma<T, n, kTransposed>(d, registers[i], of_b, i > 0 || p.add);
      }
      if (i % 2 == 1) wgmma_commit();
    }
    wgmma_wait<1>();
    wgmma_wait<0>(d);
    store_sums<n>(p, d, row);
  }
}

template <class T, int n>
CHARONIA_KERNEL(kWarpgroup, 1)
void mma_kernel(const ProductProbe p) {
  dependency_trigger();
  dependency_wait();
  const int row = warp_id() * 16, g = lane_id() / 4, t = lane_id() % 4;
  float d[n / 2] = {};
  for (int k = 0; k < kProbeK; k += 16) {
    std::uint32_t a[4];
    load_factor<T>(a, p.a, row, k);
    for (int j = 0; j < n / 8; ++j) {
      std::uint32_t b[2];
      CHARONIA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const auto* const from = static_cast<const T*>(p.b) + (8 * j + g) * kProbeK + k + 2 * t + 8 * i;
        b[i] = load_readonly(reinterpret_cast<const unsigned*>(from));
      }
      float four[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
      mma_m16n8k16<T>(four, a, b);
      for (int i = 0; i < 4; ++i) d[4 * j + i] = four[i];
    }
  }
  store_sums<n>(p, d, row);
}

template <class T, int n>
bool launch_wgmma(Stream& stream, Factor factor, const ProductProbe& p) {
  const Launch shape{.threads = 2 * kWarpgroup, .dynamic_shared_bytes = (kProbeM + n) * kProbeK * 2};
  switch (factor) {
    case Factor::shared:
      launch(stream, "wgmma, a in shared memory", shape, &wgmma_kernel<T, n, Factor::shared>, p);
      break;
    case Factor::written:
      launch(stream, "wgmma, a written by threads", shape, &wgmma_kernel<T, n, Factor::written>, p);
      break;
    case Factor::registers:
      launch(stream, "wgmma, a in registers", shape, &wgmma_kernel<T, n, Factor::registers>, p);
      break;
    case Factor::registers_transposed:
      launch(stream, "wgmma, b transposed", shape, &wgmma_kernel<T, n, Factor::registers_transposed>, p);
      break;
  }
  return true;
}

template <int n>
bool launch_integers(Stream& stream, Factor factor, const ProductProbe& p) {
  if (factor != Factor::shared) return false;
  launch(stream, "wgmma of integers", {.threads = 2 * kWarpgroup, .dynamic_shared_bytes = (kProbeM + n) * kProbeK * 2},
         &wgmma_kernel<i8x2, n, Factor::shared>, p);
  return true;
}

}  // namespace

void probe_bulk(Stream& stream, const BulkProbe& probe) {
  constexpr std::size_t kBytes = kSlots * kBulkChunk * sizeof(float);
  launch(stream, "bulk copies", {.threads = 2 * kWarp, .dynamic_shared_bytes = kBytes}, &bulk_kernel, probe);
}

void probe_box(Stream& stream, const BoxProbe& probe) {
  const Launch shape{.threads = 128, .dynamic_shared_bytes = static_cast<std::size_t>(probe.bytes)};
  const auto kernel = probe.rank == 2 ? &box_kernel<2> : probe.rank == 3 ? &box_kernel<3> : &box_kernel<4>;
  launch(stream, "copy of a box", shape, kernel, probe);
}

void probe_wgmma(Stream& stream, DType type, int n, Factor factor, const ProductProbe& probe) {
  const auto launch_half = [&]<class T>(T) {
    return n == 32    ? launch_wgmma<T, 32>(stream, factor, probe)
           : n == 64  ? launch_wgmma<T, 64>(stream, factor, probe)
           : n == 128 ? launch_wgmma<T, 128>(stream, factor, probe)
           : n == 256 ? launch_wgmma<T, 256>(stream, factor, probe)
                      : false;
  };
  const bool known = type != DType::i8 ? with_half(type, launch_half)
                     : n == 128        ? launch_integers<128>(stream, factor, probe)
                     : n == 256        ? launch_integers<256>(stream, factor, probe)
                                       : false;
  if (!known) throw Error(ErrorCode::internal, "no probe of this type and size");
}

void probe_mma(Stream& stream, DType type, int n, const ProductProbe& probe) {
  const bool known = n == 64 && with_half(type, [&]<class T>(T) {
                       launch(stream, "mma", {.threads = kWarpgroup}, &mma_kernel<T, 64>, probe);
                       return true;
                     });
  if (!known) throw Error(ErrorCode::internal, "no probe of this type and size");
}

}  // namespace charonia::cuda
