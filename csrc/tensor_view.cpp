#include "tensor_view.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>

namespace pagedkv {

namespace {

struct DTypes {
  int32_t float32 = aoti_torch_dtype_float32();
  int32_t float16 = aoti_torch_dtype_float16();
  int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  int32_t int32 = aoti_torch_dtype_int32();
  int32_t int64 = aoti_torch_dtype_int64();
  int32_t int8 = aoti_torch_dtype_int8();
  int32_t float8_e4m3fn = aoti_torch_dtype_float8_e4m3fn();
  int32_t float8_e5m2 = aoti_torch_dtype_float8_e5m2();
};

const DTypes& dtypes() {
  static const DTypes values;
  return values;
}

}  // namespace

TensorView::TensorView(const Tensor& t) : tensor(&t) {
  AtenTensorHandle handle = t.get();
  void* address = nullptr;
  int64_t *size_pointer = nullptr, *stride_pointer = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &address));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &size_pointer));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &stride_pointer));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
  data = static_cast<char*>(address);
  sizes = size_pointer;
  strides = stride_pointer;
}

// torch counts the copy of a tensor onto itself, which moves nothing, like any in-place op. It refuses it to a tensor
// made under inference_mode, which has no version, only outside of that mode and when the guard did not run: when all
// tensors of the call were made so. The question costs 0.2 us.
bool count_write(const TensorView& written, bool counted) {
  AtenTensorHandle handle = written.tensor->get();
  if (!counted) {
    StableIValue stack[] = {torch::stable::detail::from(*written.tensor)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_inference", "", stack, TORCH_ABI_VERSION));
    if (torch::stable::detail::to<bool>(stack[0])) return false;
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(handle, handle, 0));
  return true;
}

bool TensorView::empty() const { return std::find(sizes, sizes + dim, 0) != sizes + dim; }

int64_t TensorView::bytes() const {
  if (empty()) return 0;
  int64_t n = itemsize();
  for (int64_t i = 0; i < dim; ++i) n = times(n, sizes[i]);
  return n;
}

const char* TensorView::end() const {
  int64_t last = 0;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] > 1) last += (sizes[i] - 1) * strides[i];
  }
  return data + (last + 1) * itemsize();
}

void TensorView::read_indices(int64_t* out, int64_t begin, int64_t end, int64_t row) const {
  const int64_t step = strides[dim - 1], first = (dim > 1 ? row * strides[0] : 0) + begin * step;
  const auto read = [&](const auto* source) {
    for (int64_t i = 0; i < end - begin; ++i) out[i] = source[first + i * step];
  };
  if (itemsize() == 8) {
    read(reinterpret_cast<const int64_t*>(data));
  } else {
    read(reinterpret_cast<const int32_t*>(data));
  }
}

bool TensorView::is_index() const { return dtype == dtypes().int32 || dtype == dtypes().int64; }

bool TensorView::is_float() const {
  const DTypes& d = dtypes();
  return dtype == d.bfloat16 || dtype == d.float32 || dtype == d.float16;
}

bool TensorView::is_int8() const { return dtype == dtypes().int8; }

bool TensorView::is_quantised() const {
  const DTypes& d = dtypes();
  return dtype == d.int8 || dtype == d.float8_e4m3fn || dtype == d.float8_e5m2;
}

int64_t TensorView::itemsize() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }

DType TensorView::element_type() const {
  const DTypes& d = dtypes();
  if (dtype == d.bfloat16) return DType::kBFloat16;
  if (dtype == d.float32) return DType::kFloat32;
  if (dtype == d.float16) return DType::kFloat16;
  if (dtype == d.int8) return DType::kInt8;
  return dtype == d.float8_e4m3fn ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
}

std::string dtype_name(int32_t dtype) {
  const struct {
    int32_t dtype;
    const char* name;
  } names[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
  };
  for (const auto& entry : names) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "an unknown dtype";
}

bool is_cpu(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  static const int32_t cpu = aoti_torch_device_type_cpu();
  return type == cpu;
}

std::string device_name(const Tensor& tensor) {
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  const std::string name = type == aoti_torch_device_type_cuda()  ? "cuda"
                           : type == aoti_torch_device_type_xpu() ? "xpu"
                           : type == aoti_torch_device_type_mps() ? "mps"
                                                                  : "another device";
  return name + ":" + std::to_string(index);
}

Tensor empty_cpu(const int64_t* sizes, int64_t dim, int32_t dtype, const char* purpose) {
  int64_t strides[8];
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride = times(stride, max_of<int64_t>(sizes[i], 1));
  }
  const bool empty = std::find(sizes, sizes + dim, 0) != sizes + dim;
  const int64_t bytes = empty ? 0 : times(stride, aoti_torch_dtype_element_size(dtype));
  AtenTensorHandle handle = nullptr;
  if (bytes == INT64_MAX ||
      aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle)) {
    throw OutOfMemory{bytes, purpose};
  }
  return Tensor(handle);
}

char* data_of(const Tensor& tensor) {
  void* address = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &address));
  return static_cast<char*>(address);
}

int32_t float32_dtype() { return dtypes().float32; }

int32_t dtype_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return dtypes().float32;
    case ScalarType::Half:
      return dtypes().float16;
    case ScalarType::BFloat16:
      return dtypes().bfloat16;
    default:
      return static_cast<int32_t>(type);
  }
}

}  // namespace pagedkv
