// The specs of te_jax/primitives/spec.py as they arrive in a custom call: one dictionary attribute called "spec",
// decoded by member name. Member order is that of the Python dataclass.
#ifndef TE_JAX_FFI_ATTRS_H_
#define TE_JAX_FFI_ATTRS_H_

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace te_jax {

// The name of the attribute that carries the spec.
inline constexpr char kSpec[] = "spec";

struct QuantizingSpec {
  std::string_view format;
  bool hp, data, data_t, amax, dbias;
  int64_t margin;
  bool power_of_two, if_unseeded;
  std::string_view dbias_dtype = "float32";
  std::string_view scaling = "tensor";
  int64_t groups = 0;

  bool quantizes() const { return data || data_t; }
};

struct QuantizeSpec : QuantizingSpec {};

struct NormSpec : QuantizingSpec {
  std::string_view kind;
  float epsilon;
  bool zero_centered_gamma, stats;
};

struct NormGradSpec {
  std::string_view kind;
  bool zero_centered_gamma, residual;
};

struct ActivationSpec : QuantizingSpec {
  std::string_view kind;
  bool gate_second;
  float limit = 7.0f, alpha = 1.702f, linear_offset = 1.0f;
};

struct ActivationGradSpec : ActivationSpec {};

struct DequantizeSpec {
  std::string_view out_dtype;
};

struct GemmSpec {
  bool fp8;
  int64_t contract_dims;
  bool lhs_contract_first, rhs_contract_first;
  std::string_view out_dtype;
  bool bias;
  float alpha, beta;
  bool in_place, amax, fast_accumulation;
  std::string_view lhs_scaling = "tensor", rhs_scaling = "tensor";
};

struct CollectiveGemmSpec {
  std::string_view kind, axis_name;
  int64_t ranks;
  std::string_view group;
  bool fp8, rhs_contract_first;
  std::string_view out_dtype;
  bool bias, amax, fast_accumulation;
  std::string_view lhs_scaling = "tensor", rhs_scaling = "tensor";
  bool equal_scales, keep_gathered;
  int64_t chunks;
  bool direct;
  int64_t timeout_ms;
};

struct GroupedGemmSpec {
  bool fp8, rhs_contract_first;
  std::string_view out_dtype;
  bool bias, fast_accumulation;
};

struct GroupedWgradSpec {
  int64_t groups;
  bool fp8;
  std::string_view out_dtype;
  bool fast_accumulation;
  bool accumulate = false;
};

struct ScaleReadSpec {
  std::string_view formats;
  int64_t margin;
  bool most_recent;
  int64_t groups = 0;
};

struct ScaleWriteSpec {
  std::string_view formats;
  int64_t margin;
  bool most_recent;
  std::string_view used;
  int64_t groups = 0;
};

}  // namespace te_jax

#define TE_JAX_QUANTIZING_MEMBERS                                                                         \
  StructMember<std::string_view>("format"), StructMember<bool>("hp"), StructMember<bool>("data"),         \
      StructMember<bool>("data_t"), StructMember<bool>("amax"), StructMember<bool>("dbias"),              \
      StructMember<int64_t>("margin"), StructMember<bool>("power_of_two"), StructMember<bool>("if_unseeded"), \
      StructMember<std::string_view>("dbias_dtype"), StructMember<std::string_view>("scaling"),            \
      StructMember<int64_t>("groups")

#define TE_JAX_ACTIVATION_MEMBERS                                                                           \
  TE_JAX_QUANTIZING_MEMBERS, StructMember<std::string_view>("kind"), StructMember<bool>("gate_second"),     \
      StructMember<float>("limit"), StructMember<float>("alpha"), StructMember<float>("linear_offset")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::QuantizeSpec, TE_JAX_QUANTIZING_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::NormSpec, TE_JAX_QUANTIZING_MEMBERS,
                                      StructMember<std::string_view>("kind"), StructMember<float>("epsilon"),
                                      StructMember<bool>("zero_centered_gamma"), StructMember<bool>("stats"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::NormGradSpec, StructMember<std::string_view>("kind"),
                                      StructMember<bool>("zero_centered_gamma"), StructMember<bool>("residual"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::ActivationSpec, TE_JAX_ACTIVATION_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::ActivationGradSpec, TE_JAX_ACTIVATION_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::DequantizeSpec, StructMember<std::string_view>("out_dtype"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::GemmSpec, StructMember<bool>("fp8"),
                                      StructMember<int64_t>("contract_dims"),
                                      StructMember<bool>("lhs_contract_first"),
                                      StructMember<bool>("rhs_contract_first"),
                                      StructMember<std::string_view>("out_dtype"), StructMember<bool>("bias"),
                                      StructMember<float>("alpha"), StructMember<float>("beta"),
                                      StructMember<bool>("in_place"), StructMember<bool>("amax"),
                                      StructMember<bool>("fast_accumulation"),
                                      StructMember<std::string_view>("lhs_scaling"),
                                      StructMember<std::string_view>("rhs_scaling"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    te_jax::CollectiveGemmSpec, StructMember<std::string_view>("kind"), StructMember<std::string_view>("axis_name"),
    StructMember<int64_t>("ranks"), StructMember<std::string_view>("group"), StructMember<bool>("fp8"),
    StructMember<bool>("rhs_contract_first"), StructMember<std::string_view>("out_dtype"), StructMember<bool>("bias"),
    StructMember<bool>("amax"), StructMember<bool>("fast_accumulation"), StructMember<std::string_view>("lhs_scaling"),
    StructMember<std::string_view>("rhs_scaling"), StructMember<bool>("equal_scales"),
    StructMember<bool>("keep_gathered"), StructMember<int64_t>("chunks"), StructMember<bool>("direct"),
    StructMember<int64_t>("timeout_ms"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::GroupedGemmSpec, StructMember<bool>("fp8"),
                                      StructMember<bool>("rhs_contract_first"),
                                      StructMember<std::string_view>("out_dtype"), StructMember<bool>("bias"),
                                      StructMember<bool>("fast_accumulation"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::GroupedWgradSpec, StructMember<int64_t>("groups"),
                                      StructMember<bool>("fp8"),
                                      StructMember<std::string_view>("out_dtype"),
                                      StructMember<bool>("fast_accumulation"), StructMember<bool>("accumulate"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::ScaleReadSpec, StructMember<std::string_view>("formats"),
                                      StructMember<int64_t>("margin"), StructMember<bool>("most_recent"),
                                      StructMember<int64_t>("groups"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(te_jax::ScaleWriteSpec, StructMember<std::string_view>("formats"),
                                      StructMember<int64_t>("margin"), StructMember<bool>("most_recent"),
                                      StructMember<std::string_view>("used"), StructMember<int64_t>("groups"));

#undef TE_JAX_ACTIVATION_MEMBERS
#undef TE_JAX_QUANTIZING_MEMBERS

#endif  // TE_JAX_FFI_ATTRS_H_
