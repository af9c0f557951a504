// Reads safetensors files: 8 bytes with the header length (little endian), a JSON header with the type, shape and
// offsets of every tensor, then the tensors' bytes. The file is memory-mapped, so opening it reads only the header.
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
  std::vector<std::int64_t> shape;  // row-major; [] is a scalar
  std::span<const std::byte> data;  // aligned as in the file; the format's own writers align to 8 bytes
};

// "[2, 3]"
std::string shape_text(std::span<const std::int64_t> shape);

// Element `index` of fp32, fp16 or bf16 data, which may be unaligned.
float float_at(const void* data, std::size_t index, DType type);

// Views stay valid as long as the object, or the object it was moved to.
class SafetensorsFile {
 public:
  // Checks the whole header. Throws Error(invalid_argument) with the file and the fault if the file cannot be read, is
  // truncated, has a header that is too long or invalid, or has tensors that overlap, lie outside of the file or whose
  // size does not match their shape.
  // header: the JSON header of a file of another format, whose tensors are as in a safetensors file but whose offsets
  // count from its first byte. Empty: the file has its own header.
  static SafetensorsFile open(const std::filesystem::path& path, std::string_view header = {});

  // Throws Error(invalid_argument) with the nearest name if the tensor does not exist, and Error(unsupported) if DType
  // does not have its type. A file may contain tensors of other types as long as they are not read.
  TensorView tensor(std::string_view name) const;
  // Asks the system to read ahead bytes of a view that will be used soon.
  void prefetch(std::span<const std::byte> part) const;
  // The DType for a type name of the format ("BF16"); empty if DType does not have it.
  static std::optional<DType> type_named(std::string_view name);
  bool has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  std::vector<std::string_view> names() const;  // in alphabetical order
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return path_; }
  // Frees the memory that read pages of the file use in this process. Views stay valid.
  void drop_pages() const;

 private:
  class Mapping;
  struct Unmap {
    void operator()(const Mapping* mapping) const;
  };
  struct Entry {
    std::string dtype;  // type name in the file
    std::vector<std::int64_t> shape;
    std::span<const std::byte> data;
  };

  SafetensorsFile() = default;
  void find_header();
  void read_header(std::string_view header, std::span<const std::byte> data);
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
