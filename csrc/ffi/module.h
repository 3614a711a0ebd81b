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
