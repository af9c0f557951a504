// Reads safetensors files: 8 bytes of header length (little endian), a JSON header that names every tensor's type,
// shape and place, then the tensors' bytes. The file is memory-mapped, so opening costs nothing but the header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace charonia {

struct TensorView {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // row-major; [] is one value
  std::span<const std::byte> data;  // aligned as the file has it: by the format's own writers to 8 bytes
};

// Views into it stay valid as long as the object, or what it was moved to.
class SafetensorsFile {
 public:
  // Checks the whole header: throws Error(invalid_argument), naming the file and what is wrong, for a file that cannot
  // be read, is truncated, whose header is too long or no valid JSON, or whose tensors overlap, lie outside of the file
  // or have another size than their shape.
  static SafetensorsFile open(const std::filesystem::path& path);

  // Throws Error(invalid_argument), with the nearest name, for one that is not there; Error(unsupported) for a type
  // that DType does not have. (A file may hold such tensors as long as nobody asks for them.)
  TensorView tensor(std::string_view name) const;
  // Has the system read ahead bytes of a view that will be used soon.
  void prefetch(std::span<const std::byte> part) const;
  // The type that the format calls so ("BF16"); none: DType does not have it.
  static std::optional<DType> type_named(std::string_view name);
  bool has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  std::vector<std::string_view> names() const;  // in alphabetical order
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return path_; }
  // Gives back the memory that what was read of the file takes in this process. Views stay valid.
  void drop_pages() const;

 private:
  class Mapping;
  struct Unmap {
    void operator()(const Mapping* mapping) const;
  };
  struct Entry {
    std::string dtype;  // as the file has it
    std::vector<std::int64_t> shape;
    std::span<const std::byte> data;
  };

  SafetensorsFile() = default;
  void read_header();
  Entry read_entry(const std::string& name, std::string dtype, std::vector<std::int64_t> shape,
                   std::vector<std::uint64_t> offsets, std::span<const std::byte> data) const;
  void refuse_overlaps(std::span<const std::byte> data) const;
  [[noreturn]] void refuse(const std::string& what) const;

  std::filesystem::path path_;
  std::unique_ptr<const Mapping, Unmap> mapping_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace charonia
