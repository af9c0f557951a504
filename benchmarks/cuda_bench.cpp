#include "cuda_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda_limits.h"
#include "ops/cuda/device/overlap.h"
#include "ops/cuda/gemm/blas.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kFormat = 1;
constexpr double kSecondsBetweenFiles = 3;
constexpr std::size_t kPatternBytes = std::size_t{4} << 20;
#if defined(CHARONIA_CUDA_ON_HOST)
constexpr bool kOnHost = true;
#else
constexpr bool kOnHost = false;
#endif

std::string_view name_of(Size size) { return size == Size::full ? "full" : size == Size::quick ? "quick" : "tiny"; }

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Json described(const Case& what) {
  Json shape = Json::object();
  for (const auto& [name, extent] : what.shape) {
    std::visit([&, &name = name](const auto& value) { shape[std::string(name)] = value; }, extent.value);
  }
  return {{"kernel", what.kernel}, {"shape", std::move(shape)}, {"variant", what.variant}};
}

}  // namespace

struct Bench::Results {
  Json rows = Json::array(), skipped = Json::array(), errors = Json::array(), suites = Json::object();
};

Bench::Bench(Size size, std::filesystem::path file, std::vector<std::string> only)
    : size(size),
      device(cuda::device_info(0)),
      file_(std::move(file)),
      only_(std::move(only)),
      results_(std::make_unique<Results>()) {}

Bench::~Bench() = default;

bool Bench::wanted(const Case& what) const {
  const auto text = only_.empty() ? std::string() : described(what).dump();
  return std::ranges::all_of(only_, [&](const std::string& part) { return text.find(part) != std::string::npos; });
}

bool Bench::failed() const { return !results_->errors.empty(); }

bool Bench::empty() const { return results_->rows.empty() && results_->errors.empty(); }

int Bench::copies(std::size_t bytes) const {
  if (size == Size::tiny) return 2;
  const auto wanted = 3 * device.l2_bytes / std::max<std::size_t>(bytes, 1) + 1;
  return static_cast<int>(std::min<std::size_t>(wanted, kMaxCopies));
}

bool Bench::fits(std::size_t bytes) const { return bytes + device.total_bytes / 10 < cuda::free_device_bytes(); }

DeviceMemory Bench::repeated(const void* pattern, std::size_t pattern_bytes, std::size_t bytes) {
  DeviceMemory memory(bytes, "operands of a benchmark");
  auto* const to = memory.as<std::byte>();
  std::size_t done = std::min(pattern_bytes, bytes);
  stream.upload(to, pattern, done, "operands");
  while (done < bytes) {
    const auto next = std::min(done, bytes - done);
    stream.copy(to + done, to, next, "operands");
    done += next;
  }
  stream.wait("operands");
  return memory;
}

DeviceMemory Bench::random_values(DType type, std::int64_t count, float scale) {
  const auto element = size_of(type);
  auto& pattern = patterns_[{type, scale}];
  if (pattern.empty()) {
    pattern.resize(size == Size::tiny ? kPatternBytes / 64 : kPatternBytes);
    std::normal_distribution<float> normal(0, scale);
    for (std::size_t at = 0; at < pattern.size(); at += element) {
      const float x = normal(random);
      const std::uint16_t bits = type == DType::bf16 ? float_to_bf16(x) : float_to_f16(x);
      std::memcpy(pattern.data() + at, type == DType::f32 ? static_cast<const void*>(&x) : &bits, element);
    }
  }
  return repeated(pattern.data(), pattern.size(), static_cast<std::size_t>(count) * element);
}

// As a graph, like the decode steps, so that the time is the device's and not that of launching. On the host, whose
// graphs take as long as their work, by the host's clock.
double Bench::time(double expected, const std::function<void(int)>& issue) {
  const double target = size == Size::full ? 1500 : size == Size::quick ? 400 : 1;  // microseconds of a sample
  const int samples = size == Size::full ? 5 : size == Size::quick ? 3 : 1;
  const int most = size == Size::tiny ? 2 : 128;
  const int count = std::clamp(static_cast<int>(target / std::max(expected, 1.0)), 1, most);
  issue(0);  // loads the kernel, which must not happen in a capture
  stream.wait("the first of measured launches");
  cuda::Graph::begin(stream);
  cuda::Graph graph;
  try {
    for (int i = 0; i < count; ++i) issue(i);
    graph = cuda::Graph::end(stream);
  } catch (...) {
    cuda::Graph::abandon(stream);
    throw;
  }
  if (!kOnHost) graph.launch(stream, "measured launches");
  cuda::Event begin(true), end(true);
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) {
    const auto started = Clock::now();
    begin.record(stream);
    graph.launch(stream, "measured launches");
    end.record(stream);
    end.wait("measured launches");
    const double all = kOnHost ? 1e6 * seconds_since(started) : 1e3 * cuda::Event::milliseconds(begin, end);
    times.push_back(all / count);
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

void Bench::measure_limits() {
  const bool tiny = size == Size::tiny;
  {
    const auto bytes = tiny ? std::int64_t{1} << 16 : std::int64_t{4} << 30;
    const auto source = random_values(DType::bf16, bytes / 2);
    const DeviceMemory target(static_cast<std::size_t>(bytes)), sink(16);
    const auto rate = [&](double moved, const std::function<void(int)>& issue) {
      double best = 1e30;
      for (int i = 0; i < (tiny ? 1 : 4); ++i) best = std::min(best, time(1e9, issue));
      return moved / best * 1e6;
    };
    limits_.read = rate(static_cast<double>(bytes),
                        [&](int) { read_all(stream, device, source.data(), bytes, sink.as<std::uint32_t>()); });
    limits_.copy = rate(2.0 * static_cast<double>(bytes), [&](int) {
      stream.copy(target.data(), source.data(), static_cast<std::size_t>(bytes), "copy");
    });
    double operations = 0;
    const auto of_gemms =
        time(1e9, [&](int) { operations = multiply_in_registers(stream, device, tiny ? 1 : 20000, sink.as<float>()); });
    limits_.mma = operations / of_gemms * 1e6;
  }
  limits_.gemms = limits_.mma;
  limits_.gemm_by = "mma.sync in registers";
  std::string why;
  const auto blas = cuda::load_cublas(why);
  if (blas == nullptr) {
    limits_.gemm_by += cat(" (", why, ")");
    return;
  }
  constexpr std::int64_t kSide = 8192;
  constexpr std::size_t kWorkspace = std::size_t{32} << 20;
  const auto in = random_values(DType::bf16, kSide * kSide), weight = random_values(DType::bf16, kSide * kSide);
  const DeviceMemory out(kSide * kSide * 2), workspace(kWorkspace);
  const cuda::Gemm gemm{.out = out.data(),
                        .out_type = DType::bf16,
                        .out_stride = kSide,
                        .in = in.data(),
                        .in_stride = kSide,
                        .weight = weight.data(),
                        .type = DType::bf16,
                        .weight_stride = kSide,
                        .rows = kSide,
                        .n = kSide,
                        .k = kSide};
  for (const auto& tactic : blas->tactics(gemm, kWorkspace)) {
    bool refused = false;
    const double microseconds =
        time(1500, [&](int) { refused = !blas->run(stream, gemm, tactic, workspace.data(), kWorkspace) || refused; });
    const double rate = 2.0 * kSide * kSide * kSide / microseconds * 1e6;
    if (refused || rate < limits_.gemms) continue;
    limits_.gemms = rate;
    limits_.gemm_by = cat(blas->version(), ", 8192 x 8192 x 8192");
  }
}

void Bench::suite(std::string_view name, const std::function<void()>& run) {
  suite_ = name;
  const auto begin = Clock::now();
  const auto rows = results_->rows.size(), errors = results_->errors.size();
  const auto close = [&] {
    const double seconds = seconds_since(begin);
    const auto new_rows = results_->rows.size() - rows, new_errors = results_->errors.size() - errors;
    results_->suites[suite_] = {{"rows", new_rows}, {"errors", new_errors}, {"seconds", seconds}};
    write();
    std::printf("%s: %zu measurements, %zu errors, %.1f s\n", suite_.c_str(), new_rows, new_errors, seconds);
    std::fflush(stdout);
  };
  try {
    run();
  } catch (const Error& error) {
    results_->errors.push_back({{"suite", suite_}, {"error", error.what()}});
    close();
    throw;
  }
  close();
}

void Bench::measure(const Case& what, const std::function<void(int)>& issue) {
  if (!wanted(what)) return;
  const double bound = std::max(what.bytes / limits_.read, what.operations / limits_.gemms) * 1e6;
  const bool both = what.launched_by_us && device.major >= 9;
  for (const bool overlap : {true, false}) {
    if (!overlap && !both) break;
    cuda::allow_overlap(overlap);
    try {
      const double microseconds = time(bound + 2, issue);
      record(what, both ? std::optional(overlap) : std::nullopt, microseconds);
    } catch (const Error& error) {
      auto one = described(what);
      one["suite"] = suite_;
      one["error"] = error.what();
      results_->errors.push_back(std::move(one));
      stream.wait(cat("the device after an error of ", what.kernel));  // throws when the device is lost
    }
  }
  cuda::allow_overlap(true);
}

void Bench::record(const Case& what, std::optional<bool> overlap, double microseconds) {
  const double by_memory = what.bytes / limits_.read * 1e6, by_gemms = what.operations / limits_.gemms * 1e6;
  Json row{{"suite", suite_}};
  row.update(described(what));
  row["pdl"] = overlap ? Json(*overlap) : Json();
  row["microseconds"] = microseconds;
  row["bytes"] = what.bytes;
  row["operations"] = what.operations;
  row["limit"] = by_memory >= by_gemms ? "memory" : "gemm";
  row["share"] = std::max(by_memory, by_gemms) / microseconds;
  results_->rows.push_back(std::move(row));
  if (seconds_since(written_) > kSecondsBetweenFiles) write();
}

void Bench::skip(const Case& what, std::string why) {
  auto one = described(what);
  one["suite"] = suite_;
  one["why"] = std::move(why);
  results_->skipped.push_back(std::move(one));
}

// Replaced as a whole, so that what a killed run leaves can be read.
void Bench::write() {
  written_ = Clock::now();
  const Json all{{"format", kFormat},
                 {"size", name_of(size)},
                 {"device",
                  {{"name", device.name},
                   {"compute_capability", cat(device.major, ".", device.minor)},
                   {"sms", device.sms},
                   {"l2_bytes", device.l2_bytes},
                   {"driver", cuda::driver_version()}}},
                 {"clock", kOnHost ? "host" : "device, CUDA graphs"},
                 {"limits",
                  {{"read_bytes_per_s", limits_.read},
                   {"copy_bytes_per_s", limits_.copy},
                   {"gemm_operations_per_s", limits_.gemms},
                   {"gemm_by", limits_.gemm_by},
                   {"mma_operations_per_s", limits_.mma}}},
                 {"suites", results_->suites},
                 {"rows", results_->rows},
                 {"skipped", results_->skipped},
                 {"errors", results_->errors}};
  auto temporary = file_;
  temporary += ".tmp";
  std::ofstream out(temporary);
  out << all.dump(1) << '\n';
  out.close();
  std::error_code error;
  if (out.good()) std::filesystem::rename(temporary, file_, error);
  if (!out.good() || error) {
    throw Error(ErrorCode::invalid_argument,
                cat(file_.string(), " cannot be written: name a file in a folder that exists and can be written"));
  }
}

std::vector<ModelShape> model_shapes(Size size) {
  if (size == Size::tiny) return {{"tiny-mha", 64, 2, 2, 32, 104, 300}, {"tiny-gqa", 64, 2, 1, 32, 104, 300}};
  ModelShape llama2{"llama2-7b", 4096, 32, 32, 128, 11008, 32000}, llama3{"llama3-8b", 4096, 32, 8, 128, 14336, 128256};
  if (size == Size::quick) return {llama3};
  return {llama2, llama3};
}

}  // namespace charonia::bench
