// Common parts of the kernel tests: arrays on the device, and both orders of threads on the emulated device.
#pragma once

#include <cstring>
#include <vector>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/rows.h"
#include "ops_support.h"
#include "quantised_head.h"

#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_grid.h"
#endif

namespace charonia::cuda {

template <class T>
class DeviceArray {
 public:
  DeviceArray(Stream& stream, const std::vector<T>& from)
      : stream_(stream), n_(from.size()), memory_(from.size() * sizeof(T)) {
    if (n_ == 0) return;
    stream_.upload(memory_.data(), from.data(), n_ * sizeof(T), "a test's array");
    stream_.wait("a test's array");
  }
  T* data() const { return memory_.as<T>(); }
  std::vector<T> host() const {
    std::vector<T> out(n_);
    if (n_ == 0) return out;
    stream_.download(out.data(), memory_.data(), n_ * sizeof(T), "a test's array");
    stream_.wait("a test's array");
    return out;
  }

 private:
  Stream& stream_;
  std::size_t n_;
  DeviceMemory memory_;
};

// A Matrix on the device, `offset` elements after an aligned address.
class MatrixOnDevice {
 public:
  MatrixOnDevice(Stream& stream, const ops::Matrix& host, std::int64_t offset = 0)
      : stream_(stream),
        shape_(host),
        offset_(static_cast<std::size_t>(offset) * size_of(host.dtype)),
        memory_(offset_ + host.bytes.size()) {
    upload(host);
  }
  void upload(const ops::Matrix& host) const {
    stream_.upload(tensor().data, host.bytes.data(), host.bytes.size(), "a test's matrix");
    stream_.wait("a test's matrix");
  }
  ops::Tensor tensor() const {
    return {memory_.as<std::byte>() + offset_, shape_.dtype, shape_.rows, shape_.cols, shape_.stride};
  }
  ops::Matrix host() const {
    auto out = shape_;
    stream_.download(out.bytes.data(), tensor().data, out.bytes.size(), "a test's matrix");
    stream_.wait("a test's matrix");
    return out;
  }

 private:
  Stream& stream_;
  ops::Matrix shape_;
  std::size_t offset_;
  DeviceMemory memory_;
};

// Writes a head into the host copy of a quantised layer. kv_head: v heads follow k heads.
inline void write_head(std::vector<std::byte>& memory, const CacheLayer& layer, std::int64_t block, int kv_head,
                       int slot, const ops::QuantisedHead& head) {
  const int row = kv_head * layer.block_len + slot, half = layer.head_dim / 2;
  auto* const to = memory.data() + layer.integers_at(block, row);
  for (int d = 0; d < layer.head_dim; ++d) {
    const auto at = static_cast<std::size_t>(d);
    if (layer.quant_bits != 4) {
      to[d] = static_cast<std::byte>(head.codes[at]);
    } else if (d < half) {
      to[d] = static_cast<std::byte>(head.codes[at] + 16 * head.codes[at + static_cast<std::size_t>(half)]);
    }
  }
  const std::uint16_t both[2] = {head.scale, head.zero};
  std::memcpy(memory.data() + layer.scale_at(block, row), both, static_cast<std::size_t>(layer.scale_bytes()));
}

// Runs f once on a real device, and with both orders of a block's threads on the emulated device.
template <class F>
void in_both_orders(F f) {
#if defined(CHARONIA_CUDA_ON_HOST)
  for (const auto order : {host_grid::Order::descending, host_grid::Order::ascending}) {
    host_grid::set_order(order);
    f();
  }
#else
  f();
#endif
}

}  // namespace charonia::cuda
