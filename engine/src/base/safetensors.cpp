#include "base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "base/json.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are read in place, and their bytes are little endian");

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

// The types of the format. `type` is empty for types that the engine does not read.
struct TypeName {
  std::string_view name;
  std::uint64_t bytes;
  std::optional<DType> type;
};
constexpr TypeName kTypes[] = {
    {"F32", 4, DType::f32},         {"F16", 2, DType::f16},
    {"BF16", 2, DType::bf16},       {"I32", 4, DType::i32},
    {"I64", 8, DType::i64},         {"U8", 1, DType::u8},
    {"I8", 1, DType::i8},           {"F8_E4M3", 1, DType::f8_e4m3},
    {"F8_E8M0", 1, DType::f8_e8m0}, {"F8_E4M3FN", 1, DType::f8_e4m3},  // PyTorch's name for the same type
    {"F64", 8, std::nullopt},       {"U64", 8, std::nullopt},
    {"C64", 8, std::nullopt},       {"U32", 4, std::nullopt},
    {"I16", 2, std::nullopt},       {"U16", 2, std::nullopt},
    {"BOOL", 1, std::nullopt},      {"F8_E5M2", 1, std::nullopt},
};

const TypeName* find_type(std::string_view name) {
  const auto* found = std::ranges::find(kTypes, name, &TypeName::name);
  return found == std::end(kTypes) ? nullptr : found;
}

std::string readable_types() {
  std::string out;
  for (const auto& type : kTypes) {
    if (type.type) out += cat(out.empty() ? "" : ", ", type.name);
  }
  return out;
}

class Descriptor {
 public:
  explicit Descriptor(const std::filesystem::path& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string last_error() { return std::generic_category().message(errno); }

}  // namespace

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (const auto size : shape) out += cat(out.size() == 1 ? "" : ", ", size);
  return out + "]";
}

float float_at(const void* data, std::size_t index, DType type) {
  const auto* const at = static_cast<const std::byte*>(data) + index * size_of(type);
  float value = 0;
  std::uint16_t bits = 0;
  if (type == DType::f32) {
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::memcpy(&bits, at, sizeof bits);
  return type == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// A read-only mapping of a file.
class SafetensorsFile::Mapping {
 public:
  // Returns null and sets errno if the system call fails.
  static const Mapping* make(int fd, std::size_t bytes) {
    void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    return data == MAP_FAILED ? nullptr : new Mapping(data, bytes);
  }
  ~Mapping() { ::munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), bytes_}; }

  // Asks the system to read ahead bytes that will be used soon.
  void prefetch(std::span<const std::byte> part) const {
    static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto offset = static_cast<std::size_t>(part.data() - bytes().data()) / page * page;
    const auto end = static_cast<std::size_t>(part.data() - bytes().data()) + part.size();
    if (!part.empty()) ::madvise(static_cast<std::byte*>(data_) + offset, end - offset, MADV_WILLNEED);
  }

  // Unmodified pages of a private mapping belong to the file. The system reads them again at the next access.
  void drop_pages() const { ::madvise(data_, bytes_, MADV_DONTNEED); }

 private:
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  void* data_;
  std::size_t bytes_;
};

void SafetensorsFile::drop_pages() const { mapping_->drop_pages(); }

void SafetensorsFile::prefetch(std::span<const std::byte> part) const { mapping_->prefetch(part); }

std::optional<DType> SafetensorsFile::type_named(std::string_view name) {
  const auto* type = find_type(name);
  return type == nullptr ? std::nullopt : type->type;
}

void SafetensorsFile::Unmap::operator()(const Mapping* mapping) const { delete mapping; }

void SafetensorsFile::refuse(const std::string& what) const {
  throw Error(ErrorCode::invalid_argument, cat("safetensors file ", path_.string(), " cannot be read: ", what));
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path, std::string_view header) {
  SafetensorsFile file;
  file.path_ = path;
  const Descriptor descriptor(path);
  struct stat status{};
  if (descriptor.get() < 0 || ::fstat(descriptor.get(), &status) != 0) file.refuse(last_error());
  if (!S_ISREG(status.st_mode)) file.refuse("it is not a regular file");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes < sizeof(std::uint64_t)) {
    file.refuse(cat("it is truncated: it has ", bytes, " bytes, but the header's length alone takes 8"));
  }
  file.mapping_.reset(Mapping::make(descriptor.get(), bytes));
  if (!file.mapping_) file.refuse(last_error());
  header.empty() ? file.find_header() : file.read_header(header, file.mapping_->bytes());
  return file;
}

void SafetensorsFile::find_header() {
  const auto bytes = mapping_->bytes();
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxHeaderBytes) {
    refuse(cat("its header would have ", length, " bytes, more than the maximum of ", kMaxHeaderBytes,
               "; it is probably not a safetensors file"));
  }
  if (length > bytes.size() - sizeof length) {
    refuse(cat("it is truncated: its header needs ", sizeof length + length, " bytes, but it has ", bytes.size()));
  }
  const auto header = bytes.subspan(sizeof length, length);
  read_header({reinterpret_cast<const char*>(header.data()), header.size()}, bytes.subspan(sizeof length + length));
}

void SafetensorsFile::read_header(std::string_view header, std::span<const std::byte> data) {
  try {
    const auto json = nlohmann::json::parse(header);
    if (!json.is_object()) refuse("its header is not a JSON object");
    for (const auto& [name, value] : json.items()) {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string, std::less<>>>();
        continue;
      }
      // nlohmann's library would convert doubles and strings silently.
      for (const auto* key : {"shape", "data_offsets"}) {
        for (const auto& number : value.at(key)) {
          if (!number.is_number_unsigned()) refuse(cat("tensor ", name, " has ", key, " = ", json_text(value.at(key))));
        }
      }
      entries_.emplace(name, read_entry(name, value.at("dtype").get<std::string>(),
                                        value.at("shape").get<std::vector<std::int64_t>>(),
                                        value.at("data_offsets").get<std::vector<std::uint64_t>>(), data));
    }
  } catch (const nlohmann::json::exception& error) {
    refuse(cat("its header is not valid (", error.what(), ")"));
  }
  refuse_overlaps(data);
}

SafetensorsFile::Entry SafetensorsFile::read_entry(const std::string& name, std::string dtype,
                                                   std::vector<std::int64_t> shape, std::vector<std::uint64_t> offsets,
                                                   std::span<const std::byte> data) const {
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    refuse(cat("tensor ", name, " has no valid data_offsets: two ascending numbers are needed"));
  }
  if (offsets[1] > data.size()) {
    refuse(cat("tensor ", name, " ends at byte ", offsets[1], " of the data, which has ", data.size(),
               " bytes; the file is probably truncated"));
  }
  const auto bytes = offsets[1] - offsets[0];
  if (const auto* type = find_type(dtype)) {
    auto wanted = type->bytes;
    bool fits = true;
    for (const auto size : shape) {
      fits = fits && size >= 0 && !__builtin_mul_overflow(wanted, static_cast<std::uint64_t>(size), &wanted);
    }
    if (!fits || wanted != bytes) {
      refuse(cat("tensor ", name, " of type ", dtype, " and shape ", shape_text(shape), " has ", bytes, " bytes, ",
                 fits ? cat("expected ", wanted) : "expected far more"));
    }
  }
  return {std::move(dtype), std::move(shape), data.subspan(offsets[0], bytes)};
}

void SafetensorsFile::refuse_overlaps(std::span<const std::byte> data) const {
  std::vector<std::pair<std::span<const std::byte>, std::string_view>> parts;
  for (const auto& [name, entry] : entries_) {
    if (!entry.data.empty()) parts.emplace_back(entry.data, name);
  }
  std::ranges::sort(parts, {}, [](const auto& part) { return part.first.data(); });
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto& [before, before_name] = parts[i - 1];
    const auto& [part, name] = parts[i];
    if (before.data() + before.size() > part.data()) {
      refuse(
          cat("tensors ", before_name, " and ", name, " overlap at byte ", part.data() - data.data(), " of the data"));
    }
  }
}

TensorView SafetensorsFile::tensor(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    const auto near = nearest(name, names());
    throw Error(ErrorCode::invalid_argument, cat("safetensors file ", path_.string(), " has no tensor ", name,
                                                 near.empty() ? "" : cat("; the nearest name is ", near)));
  }
  const auto& entry = found->second;
  const auto type = type_named(entry.dtype);
  if (!type) {
    throw Error(ErrorCode::unsupported, cat("tensor ", name, " of ", path_.string(), " has type ", entry.dtype,
                                            ", which is not supported; it must be one of ", readable_types()));
  }
  return {*type, entry.shape, entry.data};
}

std::vector<std::string_view> SafetensorsFile::names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) names.emplace_back(name);
  return names;
}

}  // namespace charonia
