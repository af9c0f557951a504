// Writes safetensors files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/json.h"

namespace charonia::testing {

class SafetensorsWriter {
 public:
  void add(const std::string& name, std::vector<std::int64_t> shape, const std::string& dtype,
           const std::string& bytes) {
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {data_.size(), data_.size() + bytes.size()}}};
    data_ += bytes;
  }
  void metadata(const std::string& key, const std::string& value) { header_["__metadata__"][key] = value; }
  std::uintmax_t write(const std::filesystem::path& file) const {
    write(file, header_.dump(), data_);
    return std::filesystem::file_size(file);
  }
  static void write(const std::filesystem::path& file, const std::string& header, const std::string& data) {
    const std::uint64_t size = header.size();
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof size);
    out << header << data;
  }

 private:
  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace charonia::testing
