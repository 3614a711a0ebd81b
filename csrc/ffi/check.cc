#include "csrc/ffi/check.h"

#include <optional>
#include <utility>

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

std::optional<DType> FromXla(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return DType::kF32;
    case ffi::DataType::BF16: return DType::kBF16;
    case ffi::DataType::F16: return DType::kF16;
    case ffi::DataType::F8E4M3FN: return DType::kE4M3;
    case ffi::DataType::F8E5M2: return DType::kE5M2;
    default: return std::nullopt;
  }
}

std::string NamesOf(std::initializer_list<DType> dtypes) {
  std::string names;
  for (DType dtype : dtypes) {
    if (!names.empty()) names += " or ";
    names += NameOf(dtype);
  }
  return names;
}

}  // namespace

bool ParseDType(std::string_view text, DType* dtype) {
  for (DType each : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2}) {
    if (text == NameOf(each)) {
      *dtype = each;
      return true;
    }
  }
  return false;
}

bool ParseFormat(std::string_view text, DType* format) {
  if (text != "e4m3" && text != "e5m2") return false;
  *format = text == "e4m3" ? DType::kE4M3 : DType::kE5M2;
  return true;
}

bool ParseScaling(std::string_view text, Scaling* scaling) {
  for (Scaling each : {Scaling::kTensor, Scaling::kBlock1x128, Scaling::kBlock128x128}) {
    if (text == NameOf(each)) {
      *scaling = each;
      return true;
    }
  }
  return false;
}

Shape BlockScaleShape(const Shape& data, size_t contract_dims, Scaling scaling) {
  if (scaling == Scaling::kBlock128x128) return {NumBlocks(data[0]), NumBlocks(data[1])};
  Shape shape(data.end() - static_cast<ptrdiff_t>(contract_dims), data.end());
  shape.back() = NumBlocks(shape.back());
  shape.insert(shape.end(), data.begin(), data.end() - static_cast<ptrdiff_t>(contract_dims));
  return shape;
}

std::string ToString(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

int64_t Product(const Shape& shape, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end && i < shape.size(); ++i) product *= shape[i];
  return product;
}

Array Operands::Take(std::string_view role, std::string_view name, bool exists, const ffi::AnyBuffer* buffer,
                     std::initializer_list<DType> dtypes) {
  Array array;
  array.name = name;
  if (!ok()) return array;
  if (!exists) {
    Check(false, std::string(role) + " " + std::string(name) + " is missing");
    return array;
  }
  const std::optional<DType> dtype = FromXla(buffer->element_type());
  bool allowed = false;
  for (DType each : dtypes) allowed = allowed || dtype == each;
  if (!Expect(allowed, std::string(name) + " dtype", NamesOf(dtypes),
              dtype ? std::string(NameOf(*dtype))
                    : "XLA type " + std::to_string(static_cast<int>(buffer->element_type())))) {
    return array;
  }
  array.dtype = *dtype;
  const auto dims = buffer->dimensions();
  array.shape.assign(dims.begin(), dims.end());
  array.data = buffer->untyped_data();
  return array;
}

Array Operands::Arg(std::string_view name, std::initializer_list<DType> dtypes) {
  auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
  return Take("operand", name, buffer.has_value(), buffer.has_value() ? &*buffer : nullptr, dtypes);
}

Array Operands::Ret(std::string_view name, std::initializer_list<DType> dtypes) {
  auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_++);
  return Take("result", name, buffer.has_value(), buffer.has_value() ? &**buffer : nullptr, dtypes);
}

const int32_t* Operands::Int32Of(std::string_view name, const Shape& shape) {
  const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
  if (!ok() || !Check(buffer.has_value(), "operand " + std::string(name) + " is missing")) return nullptr;
  Expect(buffer->element_type() == ffi::DataType::S32, std::string(name) + " dtype", "int32",
         "XLA type " + std::to_string(static_cast<int>(buffer->element_type())));
  const auto dims = buffer->dimensions();
  const Shape got(dims.begin(), dims.end());
  Expect(got == shape, std::string(name) + " shape", ToString(shape), ToString(got));
  return static_cast<const int32_t*>(buffer->untyped_data());
}

Array Operands::WithShape(Array array, const Shape& expected) {
  if (ok() && array.shape != expected) {
    Expect(false, std::string(array.name) + " shape", ToString(expected), ToString(array.shape));
    array.data = nullptr;
  }
  return array;
}

void Operands::Aligned(std::string_view what, int64_t value) {
  Expect(value > 0 && value % kAlignment == 0, what, "a positive multiple of " + std::to_string(kAlignment),
         std::to_string(value));
}

bool Operands::Check(bool ok, std::string_view message) {
  if (error_.success() && !ok) {
    error_ = ffi::Error::InvalidArgument("te_jax " + std::string(op_) + ": " + std::string(message));
  }
  return error_.success();
}

bool Operands::Expect(bool ok, std::string_view name, std::string_view expected, std::string_view got) {
  if (ok) return error_.success();
  return Check(false, std::string(name) + ": expected " + std::string(expected) + ", got " + std::string(got));
}

ffi::Error Operands::Finish() {
  Expect(next_arg_ == args_.size(), "number of operands", std::to_string(next_arg_), std::to_string(args_.size()));
  Expect(next_ret_ == rets_.size(), "number of results", std::to_string(next_ret_), std::to_string(rets_.size()));
  return error_;
}

}  // namespace te_jax
