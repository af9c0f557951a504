// The short convolution of recurrent layers: a causal depthwise convolution over the rows of each sequence.
//
// A thread computes kRows rows of one channel of one sequence, or all rows if the longest sequence is not known: a
// captured step. Its first inputs are the rows before them, or the state of the sequence. All outputs are sums of the
// same products in the same order, so they do not depend on the number of rows. The thread with the first row also
// writes the new state: it has read the old one before, which may be in the same slot. Each thread writes the states
// after its other rows that have a slot: the inputs in its registers. Only the first row may have the slot of the old
// state.
//
//   grid (sequences, channels / threads, rows of the longest sequence / kRows)
//
// Memory bound: neighbouring threads read neighbouring channels. A row is read once and its kernel - 1 predecessors
// come from L1, except at the beginning of a thread's rows. A decode step reads and writes kernel - 1 floats of state
// per channel next to one input and one output.
#include "ops/cuda/kernels/short_conv.h"

#include <algorithm>
#include <limits>

#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;
constexpr int kMaxKernel = 4;

struct ConvParams {
  const void* in = nullptr;
  std::int64_t in_stride = 0;
  void* out = nullptr;
  std::int64_t out_stride = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;
  float* states = nullptr;
  std::int64_t slot_floats = 0;
  const StateItem* items = nullptr;
  const std::int32_t* row_states = nullptr;
  int rows = 0;  // of a thread
  int channels = 0, kernel = 0;
  bool silu = false, gated = false;
};

// The input u of a channel at a row of the step.
template <class T>
CHARONIA_DEVICE float input_at(const ConvParams& p, std::int64_t row, int channel) {
  const T* const in = static_cast<const T*>(p.in) + row * p.in_stride + channel;
  return p.gated ? to_float(in[0]) * to_float(in[2 * p.channels]) : to_float(in[0]);
}

template <class T, class Out>
CHARONIA_KERNEL(kThreads, 1)
void short_conv_kernel(const ConvParams p) {
  dependency_trigger();
  dependency_wait();
  const StateItem item = p.items[blockIdx.x];
  const int channel = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  const int first = static_cast<int>(blockIdx.z) * p.rows;
  if (channel >= p.channels || first >= item.num_rows) return;
  const float* const old = item.in < 0 ? nullptr : p.states + item.in * p.slot_floats + channel;
  const int columns = p.kernel - 1;
  // The input at row `row` of the sequence; before row 0 it is in the state.
  const auto input = [&](int row) {
    if (row >= 0) return input_at<T>(p, std::int64_t{item.first_row} + row, channel);
    return old == nullptr ? 0.0F : old[static_cast<std::int64_t>(columns + row) * p.channels];
  };
  // The last inputs, the oldest first, and the weights for them. With a smaller kernel, the first ones are not used.
  float window[kMaxKernel], weight[kMaxKernel];
  CHARONIA_UNROLL
  for (int k = 0; k < kMaxKernel; ++k) {
    const int tap = k - (kMaxKernel - p.kernel);
    weight[k] = tap < 0 ? 0.0F : p.weight[static_cast<std::int64_t>(tap) * p.channels + channel];
    window[k] = tap <= 0 ? 0.0F : input(first + tap - 1 - columns);
  }
  if (first == 0) {
    float next[kMaxKernel - 1];
    CHARONIA_UNROLL
    for (int k = 0; k < kMaxKernel - 1; ++k) next[k] = k < columns ? input(item.num_rows - columns + k) : 0.0F;
    float* const to = p.states + item.out * p.slot_floats + channel;
    CHARONIA_UNROLL
    for (int k = 0; k < kMaxKernel - 1; ++k) {
      if (k < columns) to[static_cast<std::int64_t>(k) * p.channels] = next[k];
    }
  }
  const float bias = p.bias == nullptr ? 0.0F : p.bias[channel];
  const int end = item.num_rows - first > p.rows ? first + p.rows : item.num_rows;
  for (int row = first; row < end; ++row) {
    CHARONIA_UNROLL
    for (int k = 0; k + 1 < kMaxKernel; ++k) window[k] = window[k + 1];
    window[kMaxKernel - 1] = input(row);
    if (p.row_states != nullptr && row + 1 < item.num_rows) {
      if (const int slot = p.row_states[item.first_row + row]; slot >= 0) {
        float* const to = p.states + slot * p.slot_floats + channel;
        CHARONIA_UNROLL
        for (int k = 1; k < kMaxKernel; ++k) {
          const int at = k - (kMaxKernel - columns);
          if (at >= 0) to[static_cast<std::int64_t>(at) * p.channels] = window[k];
        }
      }
    }
    float sum = bias;
    CHARONIA_UNROLL
    for (int k = 0; k < kMaxKernel; ++k) {
      if (k >= kMaxKernel - p.kernel) sum = fmaf(weight[k], window[k], sum);
    }
    const std::int64_t at = std::int64_t{item.first_row} + row;
    if (p.gated) sum *= to_float(static_cast<const T*>(p.in)[at * p.in_stride + p.channels + channel]);
    if (p.silu) sum = activation<ops::Activation::silu>(sum);
    static_cast<Out*>(p.out)[at * p.out_stride + channel] = from_float<Out>(sum);
  }
}

}  // namespace

void short_conv(Stream& stream, const ops::Tensor& out, const ops::Tensor& in, const ops::ShortConvParams& how,
                const StateLayer& layer, const StateRows& rows, std::int64_t longest) {
  if (rows.num_items == 0) return;
  const ConvParams p{.in = in.data,
                     .in_stride = in.stride,
                     .out = out.data,
                     .out_stride = out.stride,
                     .weight = how.weight,
                     .bias = how.bias,
                     .states = layer.data,
                     .slot_floats = layer.slot_floats,
                     .items = rows.items,
                     .row_states = rows.row_states,
                     .rows = longest > 0 ? kRows : std::numeric_limits<int>::max(),
                     .channels = static_cast<int>(out.cols),
                     .kernel = how.kernel,
                     .silu = how.silu,
                     .gated = how.gated};
  const Launch shape{.grid_x = static_cast<unsigned>(rows.num_items),
                     .grid_y = static_cast<unsigned>(divide_up(out.cols, kThreads)),
                     .grid_z = static_cast<unsigned>(std::max<std::int64_t>(divide_up(longest, kRows), 1)),
                     .threads = kThreads};
  with_type(in.dtype, [&]<class T>(T) {
    if (out.dtype == DType::f32) {
      launch(stream, "short_conv", shape, short_conv_kernel<T, float>, p);
    } else {
      launch(stream, "short_conv", shape, short_conv_kernel<T, T>, p);
    }
  });
}

}  // namespace charonia::cuda
