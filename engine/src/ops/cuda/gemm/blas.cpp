#include "ops/cuda/gemm/blas.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/library.h"

namespace charonia::cuda {
namespace {

constexpr int kMaxWays = 8;

// The functions that are used. The library stays loaded.
struct Functions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmulDescCreate) matmul_create;
  decltype(&cublasLtMatmulDescDestroy) matmul_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) matmul_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) check;
  decltype(&cublasLtMatmul) multiply;
};

bool load(const Library& library, Functions& f, std::string& why) {
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = library.symbol(name);
    if (symbol == nullptr) why = cat(library.path(), " has no function ", name);
    std::memcpy(&function, &symbol, sizeof symbol);
    return symbol != nullptr;
  };
  return find(f.create, "cublasLtCreate") && find(f.destroy, "cublasLtDestroy") &&
         find(f.version, "cublasLtGetVersion") && find(f.status_string, "cublasLtGetStatusString") &&
         find(f.matmul_create, "cublasLtMatmulDescCreate") && find(f.matmul_destroy, "cublasLtMatmulDescDestroy") &&
         find(f.matmul_set, "cublasLtMatmulDescSetAttribute") && find(f.layout_create, "cublasLtMatrixLayoutCreate") &&
         find(f.layout_destroy, "cublasLtMatrixLayoutDestroy") &&
         find(f.preference_create, "cublasLtMatmulPreferenceCreate") &&
         find(f.preference_destroy, "cublasLtMatmulPreferenceDestroy") &&
         find(f.preference_set, "cublasLtMatmulPreferenceSetAttribute") &&
         find(f.heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(f.check, "cublasLtMatmulAlgoCheck") &&
         find(f.multiply, "cublasLtMatmul");
}

// Loaded once per process, even if it fails.
struct Loaded {
  Library library{
      "CHARONIA_CUBLASLT", {"libcublasLt.so.13", "libcublasLt.so.12"}, {"nvidia/cu13/lib", "nvidia/cublas/lib"}};
  Functions functions{};
  std::string why;  // empty if all functions were found

  Loaded() {
    if (!library) why = library.why();
    if (library && load(library, functions, why)) return;
    why = cat("cuBLASLt cannot be loaded (", why,
              "): pip install nvidia-cublas, or set CHARONIA_CUBLASLT to the file libcublasLt.so.13 or its folder");
  }
};

const Loaded& loaded() {
  static const Loaded one;
  return one;
}

const Functions& cublas() { return loaded().functions; }

void require(cublasStatus_t status, const char* operation) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::internal, cat("cuBLASLt, ", operation, ": ", cublas().status_string(status)));
}

cudaDataType_t data_type(DType type) {
  return type == DType::i8        ? CUDA_R_8I
         : type == DType::i32     ? CUDA_R_32I
         : type == DType::f8_e4m3 ? CUDA_R_8F_E4M3
         : type == DType::bf16  ? CUDA_R_16BF
         : type == DType::f16   ? CUDA_R_16F
                                : CUDA_R_32F;
}

// The type of weight and input. The library gets FP8 for 8-bit products.
DType operand_type(const Gemm& gemm) { return is_w8a8(gemm) ? DType::f8_e4m3 : gemm.type; }

template <class T, auto destroy>
struct Destroy {
  void operator()(T* one) const { (cublas().*destroy)(one); }
};
using MatmulDescription =
    std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescOpaque_t, &Functions::matmul_destroy> >;
using Layout =
    std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutOpaque_t, &Functions::layout_destroy> >;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                                   Destroy<cublasLtMatmulPreferenceOpaque_t, &Functions::preference_destroy> >;

// Sets the scales of output columns and rows, a mode of cuBLASLt 12.9 and newer on compute capability 9.0. Older
// libraries do not know the attribute.
bool set_scales(cublasLtMatmulDesc_t matmul, const QuantWeight& quant) {
  constexpr std::int32_t kModeOfA = 31, kModeOfB = 32, kOfRowsAndColumns = 3;  // older headers do not have the names
  const auto set = [&](int attribute, const auto& value) {
    return cublas().matmul_set(matmul, static_cast<cublasLtMatmulDescAttributes_t>(attribute), &value, sizeof value) ==
           CUBLAS_STATUS_SUCCESS;
  };
  return set(kModeOfA, kOfRowsAndColumns) && set(kModeOfB, kOfRowsAndColumns) &&
         set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, quant.column_scales) &&
         set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, quant.row_scales);
}

// Sums in float, or in int32; float operands are not converted to TF32.
MatmulDescription describe_matmul(bool integers) {
  cublasLtMatmulDesc_t native = nullptr;
  const auto status = integers ? cublas().matmul_create(&native, CUBLAS_COMPUTE_32I, CUDA_R_32I)
                               : cublas().matmul_create(&native, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  require(status, "a GEMM's description");
  MatmulDescription matmul(native);
  const cublasOperation_t weight = CUBLAS_OP_T, in = CUBLAS_OP_N;
  require(cublas().matmul_set(native, CUBLASLT_MATMUL_DESC_TRANSA, &weight, sizeof weight), "a GEMM's description");
  require(cublas().matmul_set(native, CUBLASLT_MATMUL_DESC_TRANSB, &in, sizeof in), "a GEMM's description");
  return matmul;
}

Layout describe_matrix(DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  cublasLtMatrixLayout_t native = nullptr;
  require(cublas().layout_create(&native, data_type(type), static_cast<std::uint64_t>(rows),
                                 static_cast<std::uint64_t>(cols), stride),
          "a matrix's description");
  return Layout(native);
}

// The library's matrices are column-major, so a row-major matrix is its transpose there: out^T [n, rows] = weight ([k,
// n] there, transposed) * in^T ([k, rows] there).
struct Description {
  explicit Description(const Gemm& gemm)
      : matmul(describe_matmul(gemm.type == DType::i8)),
        weight(describe_matrix(operand_type(gemm), gemm.k, gemm.n, gemm.weight_stride)),
        in(describe_matrix(operand_type(gemm), gemm.k, gemm.rows, gemm.in_stride)),
        out(describe_matrix(gemm.out_type, gemm.n, gemm.rows, gemm.out_stride)),
        known(!is_w8a8(gemm) || set_scales(matmul.get(), *gemm.quant)) {}
  MatmulDescription matmul;
  Layout weight, in, out;
  bool known;  // false: the library is too old for these scales
};

Preference describe_preference(std::size_t workspace_bytes) {
  cublasLtMatmulPreference_t native = nullptr;
  require(cublas().preference_create(&native), "a preference");
  Preference preference(native);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    require(cublas().preference_set(native, attribute, &value, sizeof value), "a preference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(workspace_bytes));
  // Partial sums over K are also in float, not in the output's type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto matrix : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(matrix, std::uint32_t{16});
  }
  return preference;
}

class CublasLt final : public Blas {
 public:
  CublasLt() { require(cublas().create(&handle_), "start"); }
  ~CublasLt() override { cublas().destroy(handle_); }

  std::string version() const override { return cat("cublasLt ", cublas().version()); }

  std::vector<BlasTactic> tactics(const Gemm& gemm, std::size_t workspace_bytes) override {
    if (!fits(gemm)) return {};
    const Description description(gemm);
    if (!description.known) return {};
    const auto preference = describe_preference(workspace_bytes);
    std::array<cublasLtMatmulHeuristicResult_t, kMaxWays> results{};
    int count = 0;
    const auto status = cublas().heuristic(handle_, description.matmul.get(), description.weight.get(),
                                           description.in.get(), description.out.get(), description.out.get(),
                                           preference.get(), kMaxWays, results.data(), &count);
    std::vector<BlasTactic> tactics;
    if (status != CUBLAS_STATUS_SUCCESS) return tactics;
    for (int i = 0; i < count; ++i) {
      const auto& result = results[static_cast<std::size_t>(i)];
      if (result.state != CUBLAS_STATUS_SUCCESS) continue;
      BlasTactic tactic;
      static_assert(sizeof result.algo == sizeof tactic.algorithm);
      std::memcpy(tactic.algorithm.data(), &result.algo, sizeof result.algo);
      tactic.workspace_bytes = result.workspaceSize;
      tactics.push_back(tactic);
    }
    return tactics;
  }

  bool serves(const Gemm& gemm, const BlasTactic& tactic, std::size_t workspace_bytes) override {
    if (!fits(gemm)) return false;
    const Description description(gemm);
    if (!description.known) return false;
    const auto algorithm = native(tactic);
    cublasLtMatmulHeuristicResult_t result{};
    return cublas().check(handle_, description.matmul.get(), description.weight.get(), description.in.get(),
                          description.out.get(), description.out.get(), &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= workspace_bytes;
  }

  bool run(Stream& stream, const Gemm& gemm, const BlasTactic& tactic, void* workspace,
           std::size_t workspace_bytes) override {
    if (!fits(gemm)) return false;
    const Description description(gemm);
    if (!description.known) return false;
    const auto algorithm = native(tactic);
    const float one = 1, zero = 0;
    const std::int32_t whole_one = 1, whole_zero = 0;
    const bool integers = gemm.type == DType::i8;
    const void* const alpha = integers ? static_cast<const void*>(&whole_one) : &one;
    const void* const beta = integers ? static_cast<const void*>(&whole_zero) : &zero;
    const auto status =
        cublas().multiply(handle_, description.matmul.get(), alpha, gemm.weight, description.weight.get(), gemm.in,
                          description.in.get(), beta, gemm.out, description.out.get(), gemm.out, description.out.get(),
                          &algorithm, workspace, workspace_bytes, stream.native());
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return false;
    require(status, cat("GEMM of ", gemm.rows, " x ", gemm.k, " with ", gemm.n, " x ", gemm.k).c_str());
    return true;
  }

 private:
  // The alignment that the preference promises.
  static bool fits(const Gemm& gemm) {
    const auto type = operand_type(gemm);
    return aligned(gemm.in, gemm.in_stride, type) && aligned(gemm.out, gemm.out_stride, gemm.out_type) &&
           aligned(gemm.weight, gemm.weight_stride, type);
  }

  static cublasLtMatmulAlgo_t native(const BlasTactic& tactic) {
    cublasLtMatmulAlgo_t algorithm;
    std::memcpy(&algorithm, tactic.algorithm.data(), sizeof algorithm);
    return algorithm;
  }

  cublasLtHandle_t handle_ = nullptr;
};

}  // namespace

std::unique_ptr<Blas> load_cublas(std::string& why) {
  why = loaded().why;
  if (!why.empty()) return nullptr;
  try {
    return std::make_unique<CublasLt>();
  } catch (const Error& error) {
    why = error.what();
    return nullptr;
  }
}

std::string driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "the driver's version");
  return cat("driver ", version);
}

}  // namespace charonia::cuda
