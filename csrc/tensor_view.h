// Sizes, strides and address of a tensor, read once from the stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cpu/types.h"

namespace pagedkv {

using torch::stable::Tensor;

struct TensorView {
  char* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t dim = 0;
  int32_t dtype = 0;  // torch's own number, see dtype_name
  const Tensor* tensor = nullptr;

  TensorView() = default;
  explicit TensorView(const Tensor& t);

  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  bool empty() const;       // of elements
  int64_t bytes() const;    // of its elements, at most INT64_MAX
  const char* end() const;  // one past the last byte that it touches, unless empty()
  // Whether their address ranges overlap: mostly not, which the end of the first one tells.
  bool touches(const TensorView& other) const {
    const bool overlap = data <= other.data ? other.data < end() : data < other.end();
    return overlap && !empty() && !other.empty();
  }
  bool is_index() const;
  bool is_float() const;
  bool is_int8() const;
  bool is_quantised() const;  // int8, float8_e4m3fn or float8_e5m2
  int64_t itemsize() const;
  DType element_type() const;  // of a tensor that is_float() or is_quantised()
  // Elements [begin, end) along the last dimension of an index tensor; `row` is the index in the first of two.
  void read_indices(int64_t* out, int64_t begin, int64_t end, int64_t row = 0) const;
};

// Counts writes in the versions of some tensors, in their order, where the autograd guard did not run: under
// inference_mode. `counted` tells whether one of those before has a version.
bool count_write(const TensorView& written, bool counted = false);

std::string dtype_name(int32_t dtype);
std::string device_name(const Tensor& tensor);
bool is_cpu(const Tensor& tensor);

// A contiguous tensor on the CPU with undefined contents.
Tensor empty_cpu(const int64_t* sizes, int64_t dim, int32_t dtype, const char* purpose = "");
char* data_of(const Tensor& tensor);
int32_t float32_dtype();
int32_t dtype_of(torch::headeronly::ScalarType type);

}  // namespace pagedkv
