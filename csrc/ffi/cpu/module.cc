// The Python module _te_jax_cpu.
#include "csrc/ffi/module.h"

#include <string_view>

#include "csrc/cpu/kernels.h"
#include "csrc/ffi/cpu/handlers.h"

namespace py = pybind11;

namespace {

py::dict Registrations() {
  py::dict targets;
  targets["te_jax_quantize"] = te_jax::Capsule(te_jax_cpu_quantize);
  targets["te_jax_dequantize"] = te_jax::Capsule(te_jax_cpu_dequantize);
  targets["te_jax_norm"] = te_jax::Capsule(te_jax_cpu_norm);
  targets["te_jax_norm_grad"] = te_jax::Capsule(te_jax_cpu_norm_grad);
  targets["te_jax_activation"] = te_jax::Capsule(te_jax_cpu_activation);
  targets["te_jax_activation_grad"] = te_jax::Capsule(te_jax_cpu_activation_grad);
  targets["te_jax_gemm"] = te_jax::Capsule(te_jax_cpu_gemm);
  targets["te_jax_grouped_gemm"] = te_jax::Capsule(te_jax_cpu_grouped_gemm);
  targets["te_jax_grouped_wgrad"] = te_jax::Capsule(te_jax_cpu_grouped_wgrad);
  targets["te_jax_collective_gemm"] =
      te_jax::Stages(te_jax_cpu_collective_gemm_instantiate, te_jax_cpu_collective_gemm);
  targets["te_jax_scale_read"] = te_jax::Capsule(te_jax_cpu_scale_read);
  targets["te_jax_scale_write"] = te_jax::Capsule(te_jax_cpu_scale_write);
  return targets;
}

py::dict Types() {
  py::dict types;
  types["te_jax_cpu_call_site"] = te_jax::Type(te_jax_cpu_call_site_id(), te_jax_cpu_call_site_info());
  return types;
}

// scipy names its capsules after the C signature. Only 32-bit sizes are understood here.
void SetSgemm(const py::capsule& capsule) {
  const char* name = capsule.name();
  constexpr std::string_view kPrefix = "void (char *, char *, int *, int *, int *, ";
  if (name == nullptr || std::string_view(name).substr(0, kPrefix.size()) != kPrefix) {
    throw py::value_error("set_sgemm: expected a capsule of a BLAS sgemm with 32-bit integers, got " +
                          std::string(name == nullptr ? "an unnamed one" : name));
  }
  te_jax::cpu::SetSgemm(reinterpret_cast<te_jax::cpu::SgemmFn>(capsule.get_pointer()));
}

#if defined(__x86_64__)
constexpr char kArchitecture[] = "x86-64";
#elif defined(__aarch64__)
constexpr char kArchitecture[] = "aarch64";
#else
constexpr char kArchitecture[] = "other";
#endif

}  // namespace

PYBIND11_MODULE(_te_jax_cpu, module) {
  module.doc() = "Custom-call handlers of te_jax for CPU.";
  module.def("registrations", &Registrations, "{target name: handler capsule}, for jax.ffi.register_ffi_target.");
  module.def("types", &Types, "{type name: registration}, for jax.ffi.register_ffi_type, before the targets.");
  module.def("build_info", [] { return te_jax::BuildInfo({kArchitecture}); },
             "How this module was built: FFI API version, architectures, compiler.");
  module.def("set_sgemm", &SetSgemm, py::arg("capsule"), "Gives the BLAS routine that GEMMs are computed with.");
}
