// The Python module _te_jax_cuda. Importing it makes no CUDA call, so it loads without a driver.
#include "csrc/ffi/module.h"

#include "csrc/ffi/cuda/handlers.h"
#include "csrc/gemm/cublaslt.h"

#ifndef TE_JAX_CUDA_ARCHITECTURES
#define TE_JAX_CUDA_ARCHITECTURES "unknown"
#endif

namespace py = pybind11;

namespace {

py::dict Registrations() {
  py::dict targets;
  targets["te_jax_quantize"] = te_jax::Capsule(te_jax_cuda_quantize);
  targets["te_jax_dequantize"] = te_jax::Capsule(te_jax_cuda_dequantize);
  targets["te_jax_norm"] = te_jax::Capsule(te_jax_cuda_norm);
  targets["te_jax_activation"] = te_jax::Capsule(te_jax_cuda_activation);
  targets["te_jax_activation_grad"] = te_jax::Capsule(te_jax_cuda_activation_grad);
  targets["te_jax_gemm"] = te_jax::Capsule(te_jax_cuda_gemm);
  return targets;
}

py::dict BuildInfo() {
  py::dict info = te_jax::BuildInfo({TE_JAX_CUDA_ARCHITECTURES});
  info["cublaslt_headers"] = CUBLAS_VERSION;
  info["cuda"] = CUDART_VERSION;
  return info;
}

py::dict CublasLtStatus() {
  const te_jax::gemm::CublasLt& lt = te_jax::gemm::LoadedCublasLt();
  py::dict status;
  status["version"] = lt.error.empty() ? py::object(py::int_(lt.get_version())) : py::object(py::none());
  status["path"] = lt.path;
  status["error"] = lt.error;
  return status;
}

}  // namespace

PYBIND11_MODULE(_te_jax_cuda, module) {
  module.doc() = "Custom-call handlers of te_jax for CUDA.";
  module.def("registrations", &Registrations, "{target name: handler capsule}, for jax.ffi.register_ffi_target.");
  module.def("build_info", &BuildInfo,
             "How this module was built: FFI API version, architectures, compiler, CUDA and cuBLASLt header versions.");
  module.def("cublaslt_status", &CublasLtStatus,
             "Loads cuBLASLt: its version (None if it can't be loaded), its path, and why it can't.");
  module.def(
      "cublaslt_version",
      [] { return te_jax::gemm::LoadedCublasLt().error.empty() ? te_jax::gemm::LoadedCublasLt().get_version() : 0; },
      "The version of the cuBLASLt that is loaded at run time, e.g. 130100; 0 if it can't be loaded.");
}
