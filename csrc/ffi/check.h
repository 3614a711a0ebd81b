// Reads the operands and results of a custom call one after the other and checks each. The first thing that is wrong
// is kept as a typed error that names op, operand, expected and got; what is read after it is empty. So a decoder is
// a straight list of what it takes, with one test at the end.
#ifndef TE_JAX_FFI_CHECK_H_
#define TE_JAX_FFI_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/args.h"
#include "csrc/core/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace te_jax {

using Shape = std::vector<int64_t>;

// One operand or result: a view, nothing owned.
struct Array {
  std::string_view name;
  DType dtype = DType::kF32;
  Shape shape;
  void* data = nullptr;
};

// Contracted and minor dimensions of custom calls are multiples of this: 16-byte rows at one byte per element.
inline constexpr int64_t kAlignment = 16;

inline constexpr std::initializer_list<DType> kHighPrecision = {DType::kF32, DType::kBF16, DType::kF16};

std::string ToString(const Shape& shape);
int64_t Product(const Shape& shape, size_t begin, size_t end);

class Operands {
 public:
  Operands(std::string_view op, const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets)
      : op_(op), args_(args), rets_(rets) {}

  std::string_view op() const { return op_; }

  // The next operand (Arg) or result (Ret), of any shape and one of the dtypes.
  Array Arg(std::string_view name, std::initializer_list<DType> dtypes);
  Array Ret(std::string_view name, std::initializer_list<DType> dtypes);

  // The same with a known shape, as the pointer that the kernels take.
  template <typename T = void>
  const T* ArgOf(std::string_view name, DType dtype, const Shape& shape) {
    return static_cast<const T*>(WithShape(Arg(name, {dtype}), shape).data);
  }
  const int32_t* Int32Of(std::string_view name, const Shape& shape);
  template <typename T = void>
  T* RetOf(std::string_view name, DType dtype, const Shape& shape) {
    return static_cast<T*>(WithShape(Ret(name, {dtype}), shape).data);
  }

  Array WithShape(Array array, const Shape& expected);

  // `value` (of `what`, e.g. "x's last dimension") is a positive multiple of kAlignment.
  void Aligned(std::string_view what, int64_t value);

  // Keeps the error "<op>: <message>" unless `ok`. Returns `ok` and that nothing went wrong before.
  bool Check(bool ok, std::string_view message);
  // The same for an attribute or a value that is not what is supported: "<op>: <name>: expected .., got ..".
  bool Expect(bool ok, std::string_view name, std::string_view expected, std::string_view got);

  bool ok() const { return error_.success(); }

  // The first error; also one if operands or results are left over.
  xla::ffi::Error Finish();

 private:
  Array Take(std::string_view role, std::string_view name, bool exists, const xla::ffi::AnyBuffer* buffer,
             std::initializer_list<DType> dtypes);

  std::string_view op_;
  const xla::ffi::RemainingArgs& args_;
  const xla::ffi::RemainingRets& rets_;
  size_t next_arg_ = 0, next_ret_ = 0;
  xla::ffi::Error error_;
};

// Parses "e4m3"/"e5m2", and the dtype names of Python. False where the text names none.
bool ParseFormat(std::string_view text, DType* format);
bool ParseDType(std::string_view text, DType* dtype);

// "tensor", "block_1x128" or "block_128x128".
bool ParseScaling(std::string_view text, Scaling* scaling);
inline constexpr char kScalings[] = "tensor, block_1x128 or block_128x128";

// The shape of the scales of data [*kept, *contracted] in blocks, whose last `contract_dims` dimensions a GEMM
// contracts: [*contracted in blocks, *kept], or [kept blocks, contracted blocks] for 128x128.
Shape BlockScaleShape(const Shape& data, size_t contract_dims, Scaling scaling);

}  // namespace te_jax

#endif  // TE_JAX_FFI_CHECK_H_
