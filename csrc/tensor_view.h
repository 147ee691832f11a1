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
  int64_t numel() const;
  bool is_index() const;
  bool is_float() const;
  int64_t itemsize() const;
  DType float_type() const;  // of a tensor that is_float()
  IndexArray indices() const { return {data, dim > 0 ? strides[0] : 1, itemsize() == 8}; }
};

std::string dtype_name(int32_t dtype);
std::string device_name(const Tensor& tensor);
bool is_cpu(const Tensor& tensor);

// A contiguous tensor on the CPU with undefined contents.
Tensor empty_cpu(const int64_t* sizes, int64_t dim, int32_t dtype);
char* data_of(const Tensor& tensor);
int32_t float32_dtype();

}  // namespace pagedkv
