// What both Python modules offer: the handlers by target name, and how the module was built.
#ifndef TE_JAX_FFI_MODULE_H_
#define TE_JAX_FFI_MODULE_H_

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifndef TE_JAX_COMPILER
#define TE_JAX_COMPILER "unknown"
#endif

namespace te_jax {

// A handler as jax.ffi.register_ffi_target takes it.
template <typename Handler>
pybind11::capsule Capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return pybind11::capsule(reinterpret_cast<void*>(handler));
}

// A handler with a stage that makes the state of each of its places in a program.
template <typename Handler>
pybind11::dict Stages(Handler* instantiate, Handler* execute) {
  pybind11::dict stages;
  stages["instantiate"] = Capsule(instantiate);
  stages["execute"] = Capsule(execute);
  return stages;
}

// The type of such a state, as jax.ffi.register_ffi_type takes it.
inline pybind11::dict Type(XLA_FFI_TypeId* id, const XLA_FFI_TypeInfo* info) {
  pybind11::dict type;
  type["type_id"] = pybind11::capsule(static_cast<void*>(id));
  type["type_info"] = pybind11::capsule(static_cast<void*>(const_cast<XLA_FFI_TypeInfo*>(info)));
  return type;
}

// {"ffi_api": (major, minor), "architectures": [...], "compiler": "..."}
inline pybind11::dict BuildInfo(const std::vector<std::string>& architectures) {
  pybind11::list names;
  for (const std::string& name : architectures) names.append(name);
  pybind11::dict info;
  info["ffi_api"] = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["architectures"] = names;
  info["compiler"] = TE_JAX_COMPILER;
  return info;
}

}  // namespace te_jax

#endif  // TE_JAX_FFI_MODULE_H_
