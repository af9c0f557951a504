// Asynchronous instructions of compute capability 9.0: barriers in shared memory (mbarrier), copies by the TMA unit,
// and products of a warpgroup (wgmma). Each has a host version that takes effect as late as the device may let it, and
// detects wrong use (engine/tests/emulator/host_async.h).
//
// Barriers and copies need sm_90 (DeviceInfo::clusters); products and take_registers() need sm_90a (DeviceInfo::wgmma).
// Code for other architectures traps.
//
// BARRIERS. A phase ends when `arrivals` threads have arrived and all bytes that they expect have been copied; then the
// next phase begins. The first phase has parity 0, the next one 1, then 0 again.
//   barrier_init(b, arrivals)       one thread, then barrier_init_fence() by this thread, then __syncthreads()
//   barrier_arrive(b)               the thread's earlier reads and writes are done for a thread that waits
//   barrier_arrive_expect(b, bytes) also expects this number of bytes in the current phase
//   barrier_wait(b, parity)         until the phase of this parity has ended. The phase before the first one counts as
//                                   ended, so a wait for parity 1 of a new barrier returns immediately. The thread
//                                   must know that the phase before this one has ended: otherwise the wait can return
//                                   too early, or miss the phase. Copies of different barriers end in any order.
//
// COPIES from global to shared memory. One thread issues a copy. When it is complete, its bytes count for the barrier's
// current phase. The destination must not be accessed before a wait for this phase.
//   copy_bulk(to, from, bytes, b)   contiguous; addresses and bytes are multiples of 16
//   copy_box(to, map, {x, y, ..}, b) a box of a matrix or of a tensor of 3 or 4 dimensions, from the element with these
//                                   coordinates, innermost first; elements outside the tensor become 0. `to` is aligned
//                                   to 128 bytes, or to 8 rows of the swizzle. The map is in the kernel's parameters,
//                                   which need CHARONIA_GRID_CONSTANT.
//
// SWIZZLE. Rows of 32, 64 or 128 bytes whose pieces of 16 bytes are permuted, so that reads of a column use different
// banks: swizzled(address, swizzle) of elements.h. swizzled_shared() is the block's dynamic shared memory, aligned to
// 1024 bytes as swizzled data needs.
//
// PRODUCTS. wgmma<T, n>(d, a, b, add): d [64, n] = a [64, 16] * b [n, 16]^T (+ d if add), 16-bit elements and sums in
// float; or T = i8x2, whose elements are pairs of int8 numbers (32 of them in a row), with sums in int. All 128 threads
// of a warpgroup (warps 4i to 4i + 3) call it. With warp = warp_id() % 4,
//   d[4j + c]  element (16 warp + g + 8 (c / 2), 8j + 2t + c % 2), for g and t of tensor_core.h
//   a          a descriptor of shared memory, or 4 registers: the warp's 16 rows as operand A of mma.m16n8k16
//   b          a descriptor. Rows of K; or kTransposed: rows of n, so that b [16, n].
// With pairs, n is 128 or 256, a is a descriptor, and b is not transposed.
// wgmma_fence() comes before the first product, before a product whose registers (d, a) were changed, and before the
// first product after a wgmma_wait() that has completed a group (stricter than the device).
// wgmma_commit() makes a group of the products since the last one, and wgmma_wait<n>(registers...) waits until at most n
// groups are in flight. Until then, no operand may be read or written, except as d of the next product with the same
// shape. registers: the complete sums that are read next, and registers of `a`: the compiler does not know that the wait
// changes them, and could move code that reads them in front of it.
// Shared memory that the threads have written is visible to products after async_fence() by the writer.
//
// take_registers<n>() and leave_registers<n>() set the number of registers of a warpgroup's threads.
#pragma once

#include "native_hopper.h"
#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

// The descriptor of a matrix in shared memory, which begins at `at` with 8 rows of the swizzle's width. eights: bytes
// from 8 rows to the next 8. across: bytes from one width of columns to the next, for transposed matrices, and for
// Swizzle::none, where the width is 16 bytes.
CHARONIA_DEVICE std::uint64_t matrix_descriptor(const void* at, Swizzle swizzle, int eights, int across = 16) {
  constexpr std::uint64_t kField = 0x3fff;
  const std::uint64_t mode = swizzle == Swizzle::none     ? 0
                             : swizzle == Swizzle::of_128 ? 1
                             : swizzle == Swizzle::of_64  ? 2
                                                          : 3;
  return (std::uint64_t{shared_offset(at)} >> 4 & kField) | static_cast<std::uint64_t>(across >> 4) << 16 |
         static_cast<std::uint64_t>(eights >> 4) << 32 | mode << 62;
}

}  // namespace charonia::cuda
