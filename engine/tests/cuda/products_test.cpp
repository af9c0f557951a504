// Which way a product goes, and what is remembered of it. A slow library stands in for cuBLASLt, and its algorithms and
// our kernels take the times that a test gives them.
#include "ops/cuda/products.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/text.h"
#include "cuda/product_case.h"
#include "ops/cuda/product_memory.h"

namespace charonia::cuda {
namespace {

namespace fs = std::filesystem;

// What runs says how long it takes, and the timer believes the last that ran.
struct Times {
  double library = 1;  // algorithm i takes i times as long
  double own = 10;
  double last = 0;
  int measured = 0;
};

class SlowLibrary final : public Blas {
 public:
  struct Log {
    std::vector<std::pair<std::int64_t, std::uint64_t>> runs;  // rows and algorithm
    std::int64_t refused_rows = -1;
  };

  SlowLibrary(Times& times, Log& log, std::string version) : times_(times), log_(log), version_(std::move(version)) {}

  std::string version() const override { return version_; }
  std::vector<BlasWay> ways(const Gemm&, std::size_t) override { return {way(3), way(1), way(2)}; }
  bool serves(const Gemm&, const BlasWay& way, std::size_t) override { return way.algorithm[0] <= 3; }

  bool run(Stream& stream, const Gemm& gemm, const BlasWay& way, void*, std::size_t) override {
    log_.runs.emplace_back(gemm.rows, way.algorithm[0]);
    times_.last = times_.library * static_cast<double>(way.algorithm[0]);
    if (gemm.rows == log_.refused_rows) return false;
    const auto in = fetch(stream, gemm.in, gemm.type, gemm.rows * gemm.in_stride - (gemm.in_stride - gemm.k));
    const auto weight = fetch(stream, gemm.weight, gemm.type, gemm.n * gemm.weight_stride);
    for (std::int64_t r = 0; r < gemm.rows; ++r) {
      for (std::int64_t c = 0; c < gemm.n; ++c) {
        double sum = 0;
        for (std::int64_t i = 0; i < gemm.k; ++i) {
          sum += static_cast<double>(in[static_cast<std::size_t>(r * gemm.in_stride + i)]) *
                 weight[static_cast<std::size_t>(c * gemm.weight_stride + i)];
        }
        const auto bits = encode(gemm.out_type, static_cast<float>(sum));
        const auto size = size_of(gemm.out_type);
        stream.upload(static_cast<std::byte*>(gemm.out) + static_cast<std::size_t>(r * gemm.out_stride + c) * size,
                      &bits, size, "test");
      }
    }
    return true;
  }

 private:
  static BlasWay way(std::uint64_t algorithm) { return {{algorithm, 7}, 0}; }
  static std::vector<float> fetch(Stream& stream, const void* from, DType type, std::int64_t count) {
    const auto size = size_of(type);
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
    stream.download(bytes.data(), from, bytes.size(), "test");
    stream.wait("test");
    std::vector<float> out;
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + i, size);
      out.push_back(decode(type, bits));
    }
    return out;
  }

  Times& times_;
  Log& log_;
  std::string version_;
};

class ProductsTest : public testing::Test {
 protected:
  ProductsTest() {
    char name[] = "/tmp/charonia_products_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~ProductsTest() override { fs::remove_all(folder_); }

  Products::Options options(bool library = true, const std::string& version = "library 1") {
    Products::Options options;
    if (library) options.blas = std::make_unique<SlowLibrary>(times_, log_, version);
    options.memory = file();
    options.timer = [this](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      times_.last = times_.own;
      issue(0);
      issue(kMostTimedProducts - 1);
      stream.wait("test");
      ++times_.measured;
      return times_.last;
    };
    return options;
  }
  fs::path file() const { return folder_ / "cache" / "products.json"; }

  static void run(Products& products, Product& product) {
    product.clear_out();
    products.run(product.stream, product.gemm());
    product.out.download(product.stream);
  }

  fs::path folder_;
  Times times_;
  SlowLibrary::Log log_;
};

constexpr Case kCase{.rows = 3, .n = 24, .k = 72, .bias = true};

TEST_F(ProductsTest, the_fastest_way_is_taken) {
  for (const double library : {1.0, 100.0}) {
    times_.library = library;
    fs::remove_all(folder_ / "cache");
    Products products(device_info(0), options());
    Product product(kCase);
    const auto gemm = product.gemm();
    products.prepare(product.stream, {&gemm, 1}, 8);
    const auto report = products.report();
    ASSERT_EQ(report.size(), 1U);
    const auto* const expected = library == 1
                                     ? "rows 1..4 n 24 k 72 bf16 -> bf16: cuBLASLt, 1.0 us"
                                     : "rows 1..4 n 24 k 72 bf16 -> bf16: own stream 8 x 16, 4 stages, 10.0 us";
    EXPECT_EQ(report.front().substr(0, std::string(expected).size()), expected) << report.front();
    log_.runs.clear();
    run(products, product);
    product.check(true);
    if (library == 1) {
      ASSERT_EQ(log_.runs.size(), 1U);
      EXPECT_EQ(log_.runs[0], (std::pair<std::int64_t, std::uint64_t>{3, 1})) << "the library's fastest algorithm";
    } else {
      EXPECT_TRUE(log_.runs.empty());
    }
    EXPECT_EQ(products.warning(), "");
  }
}

TEST_F(ProductsTest, rows_between_classes_go_the_way_of_the_class_above) {
  auto with = options();
  const auto timer = with.timer;
  with.timer = [&](Stream& stream, double expected, const std::function<void(int)>& issue) {
    const auto before = log_.runs.size();
    double time = timer(stream, expected, issue);
    // Up to 8 rows the library is slow.
    if (log_.runs.size() > before && log_.runs.back().first <= 8) time += 1000;
    return time;
  };
  Products products(device_info(0), std::move(with));
  Product product({.rows = 1, .n = 16, .k = 64});
  auto gemm = product.gemm();
  gemm.rows = 24;
  products.prepare(product.stream, {&gemm, 1}, 8192);
  EXPECT_EQ(products.report().size(), 3U) << "1..4, 5..8 and 9..24; the shape's rows count more than max_rows";
  for (const auto& [rows, by_library] :
       {std::pair{1, false}, {5, false}, {8, false}, {9, true}, {13, true}, {24, true}}) {
    Product some({.rows = rows, .n = 16, .k = 64});
    log_.runs.clear();
    run(products, some);
    some.check();
    EXPECT_EQ(!log_.runs.empty(), by_library) << rows;
  }
}

TEST_F(ProductsTest, what_was_measured_is_remembered_for_the_same_versions) {
  Product product(kCase);
  const auto gemm = product.gemm();
  std::vector<std::string> report;
  {
    Products products(device_info(0), options());
    products.prepare(product.stream, {&gemm, 1}, 4);
    report = products.report();
    EXPECT_GT(times_.measured, 0);
    times_.measured = 0;
    products.prepare(product.stream, {&gemm, 1}, 4);
    EXPECT_EQ(times_.measured, 0) << "prepared twice";
  }
  times_.library = 1000;  // which does not show any more
  for (const auto* version : {"library 1", "library 2", "library 1"}) {
    times_.measured = 0;
    Products products(device_info(0), options(true, version));
    products.prepare(product.stream, {&gemm, 1}, 4);
    const bool same = version == std::string("library 1");
    EXPECT_EQ(times_.measured == 0, same);
    EXPECT_EQ(products.report() == report, same);
    run(products, product);
    product.check(true);
  }
  // More rows: only those classes are measured.
  times_.measured = 0;
  auto more = gemm;
  more.rows = 16;
  Products products(device_info(0), options());
  products.prepare(product.stream, {&more, 1}, 16);
  EXPECT_GT(times_.measured, 0);
  EXPECT_EQ(products.report().front(), report.front());
}

TEST_F(ProductsTest, a_file_that_is_not_ours_does_no_harm) {
  Product product(kCase);
  const auto gemm = product.gemm();
  {
    Products products(device_info(0), options());
    products.prepare(product.stream, {&gemm, 1}, 4);
  }
  nlohmann::json good;
  std::ifstream(file()) >> good;
  ASSERT_EQ(good["measured"].size(), 1U);
  std::vector<std::string> texts{"",
                                 "{",
                                 "[1, 2]",
                                 "null",
                                 R"({"format": 99, "measured": {}})",
                                 R"({"format": 1})",
                                 R"({"format": 1, "measured": [3]})",
                                 std::string(100, '\0')};
  const auto altered = [&](const auto& alter) {
    auto one = good;
    for (auto& shapes : one["measured"]) {
      for (auto& rows : shapes) {
        for (auto& way : rows) alter(way);
      }
    }
    texts.push_back(one.dump());
  };
  altered([](nlohmann::json& way) { way = 5; });
  altered([](nlohmann::json& way) { way["own"]["kernel"] = 77; });
  altered([](nlohmann::json& way) { way["own"]["tile_rows"] = "x"; });
  altered([](nlohmann::json& way) { way["own"]["k_blocks"] = 1 << 20; });
  altered([](nlohmann::json& way) { way["blas"]["algorithm"] = {1, 2}; });
  altered([](nlohmann::json& way) { way["blas"]["algorithm"][0] = 4; });  // an algorithm that the library does not know
  altered([](nlohmann::json& way) { way.erase("microseconds"); });
  for (const auto& text : texts) {
    SCOPED_TRACE(text.substr(0, 300));
    std::ofstream(file()) << text;
    times_.measured = 0;
    Products products(device_info(0), options());
    products.prepare(product.stream, {&gemm, 1}, 4);
    EXPECT_GT(times_.measured, 0);
    run(products, product);
    product.check(true);
    nlohmann::json now;
    std::ifstream(file()) >> now;
    EXPECT_EQ(now["measured"], good["measured"]);
  }
}

TEST_F(ProductsTest, a_folder_that_cannot_be_written_is_a_warning) {
  std::ofstream(folder_ / "cache") << "in the way";
  Products products(device_info(0), options());
  Product product(kCase);
  const auto gemm = product.gemm();
  products.prepare(product.stream, {&gemm, 1}, 1);
  EXPECT_NE(products.warning().find("CHARONIA_CACHE_DIR"), std::string::npos) << products.warning();
  run(products, product);
  product.check(true);
}

TEST_F(ProductsTest, many_at_once_leave_a_whole_file) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        ProductMemory memory(file(), cat("device ", t % 2));
        memory.keep({.n = t, .k = 64}, i + 1, {.own = {GemmWay::Kernel::tile, 16, 64, 6, 1}, .microseconds = 3});
        EXPECT_EQ(memory.save(), "");
        nlohmann::json now;
        std::ifstream(file()) >> now;  // throws when it is half a file
        EXPECT_EQ(now["format"], 1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(file().parent_path()), {}), 1) << "no temporary file is left";
  ProductMemory one(file(), "device 0");
  one.keep({.n = 99, .k = 64}, 1, {.microseconds = 1});
  EXPECT_EQ(one.save(), "");
  const auto before = fs::file_size(file());
  ProductMemory other(file(), "device 1");
  other.keep({.n = 98, .k = 64}, 1, {.microseconds = 1});
  EXPECT_EQ(other.save(), "");
  EXPECT_GT(fs::file_size(file()), before);
  EXPECT_TRUE(ProductMemory(file(), "device 0").find({.n = 99, .k = 64}, 1)) << "what others added is kept";
  EXPECT_FALSE(ProductMemory(file(), "device 1").find({.n = 99, .k = 64}, 1));
}

// Ways are chosen at random here, so that many meet.
TEST_F(ProductsTest, reproducible_bits_depend_on_the_row_alone) {
  auto with = options();
  with.reproducible = true;
  std::mt19937 random(5);
  const auto timer = with.timer;
  with.timer = [&](Stream& stream, double expected, const std::function<void(int)>& issue) {
    timer(stream, expected, issue);
    return 1.0 + static_cast<double>(random() % 100);
  };
  Products products(device_info(0), std::move(with));
  constexpr std::int64_t kRows = 70;
  const Case c{.out_type = DType::f32, .rows = kRows, .n = 40, .k = 520, .bias = true};
  Product all(c);
  auto gemm = all.gemm();
  products.prepare(all.stream, {&gemm, 1}, kRows);
  EXPECT_GT(products.report().size(), 3U);
  EXPECT_EQ(products.warning(), "");
  all.clear_out();
  products.run(all.stream, gemm);
  all.out.download(all.stream);
  all.check();
  for (const std::int64_t rows : {1, 2, 5, 12, 20, 40}) {
    for (const std::int64_t first : {std::int64_t{0}, kRows - rows}) {
      auto part = c;
      part.rows = rows;
      Product some(part);
      some.weight.copy(all.weight, some.stream);
      some.bias.copy(all.bias, some.stream);
      for (std::int64_t i = 0; i < rows * c.k; ++i) some.in.set(i, all.in.at(first, i));
      some.in.upload(some.stream);
      run(products, some);
      for (std::int64_t r = 0; r < rows; ++r) ASSERT_EQ(some.row(r), all.row(first + r)) << rows << " rows";
    }
  }
  EXPECT_TRUE(log_.runs.empty()) << "the library takes no part";
}

TEST_F(ProductsTest, without_a_library_everything_goes_our_way_with_a_warning) {
  auto with = options(false);
  with.no_blas = "cuBLASLt cannot be loaded (no such file)";
  Products products(device_info(0), std::move(with));
  EXPECT_EQ(products.warning().find("cuBLASLt cannot be loaded (no such file). "), 0U) << products.warning();
  for (const std::int64_t rows : {1, 40}) {
    Product product({.rows = rows, .n = 24, .k = 72, .bias = true});
    run(products, product);
    product.check();
  }
}

TEST_F(ProductsTest, what_the_library_refuses_goes_our_way) {
  Products products(device_info(0), options());
  Product product(kCase);
  const auto gemm = product.gemm();
  products.prepare(product.stream, {&gemm, 1}, 4);
  log_.refused_rows = 3;
  log_.runs.clear();
  run(products, product);
  EXPECT_EQ(log_.runs.size(), 1U);
  product.check();
}

TEST_F(ProductsTest, unprepared_or_unaligned_products_are_computed_too) {
  Products products(device_info(0), options());
  Product product(kCase);
  const auto gemm = product.gemm();
  times_.library = 1000;
  products.prepare(product.stream, {&gemm, 1}, 4);
  for (const Case& c :
       {Case{.rows = 3, .n = 24, .k = 72, .in_offset = 1}, Case{.rows = 2, .n = 24, .k = 72, .in_gap = 1},
        Case{.rows = 2, .n = 11, .k = 7}, Case{.type = DType::f16, .out_type = DType::f32, .rows = 50, .n = 9, .k = 64},
        Case{.type = DType::f32, .out_type = DType::f32, .rows = 2, .n = 9, .k = 65}}) {
    Product some(c);
    run(products, some);
    some.check();
  }
  Product none({.rows = 1, .n = 24, .k = 72});
  none.clear_out();
  auto no_rows = none.gemm();
  no_rows.rows = 0;
  products.run(none.stream, no_rows);
  none.out.download(none.stream);
  EXPECT_TRUE(std::isnan(none.out.at(0, 0)));
}

TEST_F(ProductsTest, without_time_or_timer_rules_choose) {
  for (const bool timer : {false, true}) {
    auto with = options();
    with.seconds = 0;
    if (!timer) with.timer = nullptr;
    Products products(device_info(0), std::move(with));
    Product product(kCase);
    const auto gemm = product.gemm();
    products.prepare(product.stream, {&gemm, 1}, 64);
    EXPECT_EQ(times_.measured, 0);
    for (const auto& line : products.report()) EXPECT_NE(line.find("by rule"), std::string::npos) << line;
    EXPECT_FALSE(fs::exists(file())) << "rules are not worth remembering";
    run(products, product);
    product.check();
  }
}

#if defined(CHARONIA_CUDA_ON_HOST)
TEST_F(ProductsTest, a_product_can_be_recorded) {
  auto with = options(false);
  Products products(device_info(0), std::move(with));
  Product product(kCase);
  const auto gemm = product.gemm();
  products.prepare(product.stream, {&gemm, 1}, 4);
  const auto measured = times_.measured;
  product.clear_out();
  Graph::begin(product.stream);
  products.run(product.stream, gemm);
  const auto graph = Graph::end(product.stream);
  product.out.download(product.stream);
  EXPECT_TRUE(std::isnan(product.out.at(0, 0))) << "not yet";
  graph.launch(product.stream, "test");
  product.out.download(product.stream);
  product.check();
  EXPECT_EQ(times_.measured, measured);
}
#endif

TEST(ProductMemoryTest, the_place_of_the_file_can_be_set) {
  const auto* const before = std::getenv("CHARONIA_CACHE_DIR");
  const std::string kept = before == nullptr ? "" : before;
  setenv("CHARONIA_CACHE_DIR", "/somewhere", 1);
  EXPECT_EQ(product_memory_path(), "/somewhere/products.json");
  unsetenv("CHARONIA_CACHE_DIR");
  if (const auto* const home = std::getenv("HOME")) {
    EXPECT_EQ(product_memory_path(), fs::path(home) / ".cache/charonia/products.json");
  }
  if (before != nullptr) setenv("CHARONIA_CACHE_DIR", kept.c_str(), 1);
}

}  // namespace
}  // namespace charonia::cuda
