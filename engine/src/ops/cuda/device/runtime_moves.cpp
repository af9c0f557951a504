// Move operations of the classes in runtime.h, common to both implementations.
#include <utility>

#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  DeviceMemory taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

ReservedMemory::ReservedMemory(ReservedMemory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      what_(std::move(other.what_)),
      chunks_(std::exchange(other.chunks_, {})) {}

ReservedMemory& ReservedMemory::operator=(ReservedMemory&& other) noexcept {
  ReservedMemory taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(device_, taken.device_);
  std::swap(what_, taken.what_);
  std::swap(chunks_, taken.chunks_);
  return *this;
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  PinnedMemory taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

Graph::Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
Graph& Graph::operator=(Graph&& other) noexcept {
  Graph taken(std::move(other));
  std::swap(graph_, taken.graph_);
  return *this;
}

}  // namespace charonia::cuda
