// A hand-made call frame: what a custom call is given, without XLA.
#ifndef TE_JAX_TESTS_FRAME_H_
#define TE_JAX_TESTS_FRAME_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "csrc/ffi/check.h"
#include "xla/ffi/api/ffi.h"

namespace te_jax {

inline constexpr auto F32 = XLA_FFI_DataType_F32;
inline constexpr auto BF16 = XLA_FFI_DataType_BF16;
inline constexpr auto E4M3 = XLA_FFI_DataType_F8E4M3FN;
inline constexpr auto E5M2 = XLA_FFI_DataType_F8E5M2;
inline constexpr auto S32 = XLA_FFI_DataType_S32;

struct Spec {
  XLA_FFI_DataType dtype;
  Shape shape;
};

// Owns what an XLA_FFI_CallFrame points to.
class Frame {
 public:
  Frame(const std::vector<Spec>& args, const std::vector<Spec>& rets) {
    for (const Spec& spec : args) args_.push_back(Make(spec));
    for (const Spec& spec : rets) rets_.push_back(Make(spec));
    arg_types_.assign(args.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(rets.size(), XLA_FFI_RetType_BUFFER);
    raw_args_ = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types_.data(), args_.data()};
    raw_rets_ = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types_.data(), rets_.data()};
  }
  xla::ffi::RemainingArgs args() const { return xla::ffi::RemainingArgs(&raw_args_, 0); }
  xla::ffi::RemainingRets rets() const { return xla::ffi::RemainingRets(&raw_rets_, 0); }
  const void* arg(size_t i) const { return static_cast<XLA_FFI_Buffer*>(args_[i])->data; }
  const void* ret(size_t i) const { return static_cast<XLA_FFI_Buffer*>(rets_[i])->data; }

 private:
  void* Make(const Spec& spec) {
    shapes_.push_back(spec.shape);
    bytes_.push_back(0);
    XLA_FFI_Buffer buffer = {};
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = spec.dtype;
    buffer.data = &bytes_.back();  // an address of its own; nothing is read
    buffer.rank = static_cast<int64_t>(spec.shape.size());
    buffer.dims = shapes_.back().data();
    buffers_.push_back(buffer);
    return &buffers_.back();
  }
  std::deque<Shape> shapes_;
  std::deque<char> bytes_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> args_, rets_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  XLA_FFI_Args raw_args_;
  XLA_FFI_Rets raw_rets_;
};

}  // namespace te_jax

#endif  // TE_JAX_TESTS_FRAME_H_
