// The Python module _te_jax_cuda. Importing it makes no CUDA call, so it loads without a driver.
#include "csrc/ffi/module.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "csrc/comm/cuda/channel.h"
#include "csrc/ffi/cuda/handlers.h"
#include "csrc/gemm/cublaslt.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/activation.h"
#include "csrc/kernels/activation_grad.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/norm_grad.h"
#include "csrc/kernels/quantize.h"

#ifndef TE_JAX_CUDA_ARCHITECTURES
#define TE_JAX_CUDA_ARCHITECTURES "unknown"
#endif

namespace py = pybind11;

namespace {

py::dict Registrations(bool command_buffers) {
  te_jax::SetCommandBuffers(command_buffers);
  py::dict targets;
  targets["te_jax_quantize"] = te_jax::Capsule(te_jax_cuda_quantize);
  targets["te_jax_dequantize"] = te_jax::Capsule(te_jax_cuda_dequantize);
  targets["te_jax_norm"] = te_jax::Capsule(te_jax_cuda_norm);
  targets["te_jax_norm_grad"] = te_jax::Capsule(te_jax_cuda_norm_grad);
  targets["te_jax_activation"] = te_jax::Capsule(te_jax_cuda_activation);
  targets["te_jax_activation_grad"] = te_jax::Capsule(te_jax_cuda_activation_grad);
  targets["te_jax_gemm"] = te_jax::Capsule(te_jax_cuda_gemm);
  targets["te_jax_grouped_gemm"] = te_jax::Capsule(te_jax_cuda_grouped_gemm);
  targets["te_jax_grouped_wgrad"] = te_jax::Capsule(te_jax_cuda_grouped_wgrad);
  targets["te_jax_collective_gemm"] =
      te_jax::Stages(te_jax_cuda_collective_gemm_instantiate, te_jax_cuda_collective_gemm);
  targets["te_jax_scale_read"] = te_jax::Capsule(te_jax_cuda_scale_read);
  targets["te_jax_scale_write"] = te_jax::Capsule(te_jax_cuda_scale_write);
  return targets;
}

py::dict Types() {
  py::dict types;
  types["te_jax_cuda_call_site"] = te_jax::Type(te_jax_cuda_call_site_id(), te_jax_cuda_call_site_info());
  return types;
}

// What Python's functions keep for all processes.
class PythonBoard : public te_jax::comm::Board {
 public:
  PythonBoard(py::function put, py::function get, py::function remove)
      : put_(std::move(put)), get_(std::move(get)), remove_(std::move(remove)) {}
  ~PythonBoard() override {
    for (py::function* each : {&put_, &get_, &remove_}) each->release();  // the interpreter may be gone
  }

  std::optional<std::string> Put(const std::string& key, const std::string& value) override {
    return Call([&]() -> std::optional<std::string> {
      const py::object why = put_(key, value);
      return why.is_none() ? std::nullopt : std::optional(why.cast<std::string>());
    });
  }
  std::optional<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::optional<std::string> value;
    Call([&]() -> std::optional<std::string> {
      const py::object got = get_(key, timeout.count());
      if (!got.is_none()) value = got.cast<std::string>();
      return std::nullopt;
    });
    return value;
  }
  void Remove(const std::string& key) override {
    Call([&]() -> std::optional<std::string> {
      remove_(key);
      return std::nullopt;
    });
  }

 private:
  template <typename Function>
  static std::optional<std::string> Call(const Function& function) {
    const py::gil_scoped_acquire gil;
    try {
      return function();
    } catch (const std::exception& error) {  // also what Python raises
      return error.what();
    }
  }
  py::function put_, get_, remove_;
};

void SetCollectiveBoard(py::function put, py::function get, py::function remove) {
  te_jax::comm::Channels::OfProcess().SetBoard(
      std::make_unique<PythonBoard>(std::move(put), std::move(get), std::move(remove)));
}

py::list CollectiveChannels() {
  py::list all;
  for (const auto& channel : te_jax::comm::Channels::OfProcess().All()) {
    py::dict entry;
    entry["group"] = channel->group();
    entry["rank"] = channel->self().rank();
    entry["device"] = channel->self().device();
    entry["arena_bytes"] = channel->self().arena_bytes();
    all.append(entry);
  }
  return all;
}

size_t CollectiveArenaBytes(int ranks, size_t slot_bytes) {
  return te_jax::comm::ArenaLayout(ranks, slot_bytes).Bytes();
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

// The formulas of the handlers, without their operands.
size_t WorkspaceBytes(const std::string& op, int64_t rows, int64_t cols, bool dbias, int64_t group_rows,
                      int64_t groups) {
  if (op == "norm_grad") {
    te_jax::NormGradArgs args;
    args.rows = rows;
    args.cols = cols;
    args.kind = dbias ? te_jax::NormKind::kLayerNorm : te_jax::NormKind::kRMSNorm;
    return te_jax::kernels::NormGradWorkspaceBytes(args);
  }
  float wanted = 0.0f;
  const auto bytes = [&](auto args, auto formula) {
    args.rows = rows;
    args.cols = cols;
    args.out.dbias = dbias ? &wanted : nullptr;
    args.out.scaling = group_rows > 0 ? te_jax::Scaling::kBlock1x128 : te_jax::Scaling::kTensor;
    args.out.group_rows = group_rows;
    args.out.groups = groups;
    return formula(args);
  };
  if (op == "quantize") return bytes(te_jax::QuantizeArgs(), te_jax::kernels::QuantizeWorkspaceBytes);
  if (op == "norm") return bytes(te_jax::NormArgs(), te_jax::kernels::NormWorkspaceBytes);
  if (op == "activation") return bytes(te_jax::ActivationArgs(), te_jax::kernels::ActivationWorkspaceBytes);
  if (op == "activation_grad") {
    return bytes(te_jax::ActivationGradArgs(), te_jax::kernels::ActivationGradWorkspaceBytes);
  }
  if (op == "gemm") return te_jax::gemm::kWorkspaceBytes;
  throw py::value_error("workspace_bytes: expected an operation with a workspace, got " + op);
}

py::list GemmAlgorithms() {
  py::list all;
  for (const auto& [key, choice] : te_jax::gemm::Algorithms().All()) {
    py::dict entry;
    entry["device"] = key.device;
    entry["gemm"] = key.gemm;
    entry["algorithm"] = te_jax::gemm::ToHex(choice.algorithm);
    entry["source"] = te_jax::gemm::NameOf(choice.source);
    entry["time_us"] = choice.time_us;
    entry["first_us"] = choice.first_us;
    entry["candidates"] = choice.candidates;
    entry["note"] = choice.note;
    all.append(entry);
  }
  return all;
}

bool LoadGemmAlgorithm(const std::string& device, const std::string& gemm, const std::string& algorithm,
                       float time_us, float first_us, int candidates) {
  const auto blob = te_jax::gemm::FromHex(algorithm);
  if (!blob.has_value()) {
    throw py::value_error("load_gemm_algorithm: expected 128 hexadecimal digits, got " + algorithm);
  }
  te_jax::gemm::Choice choice;
  choice.algorithm = *blob;
  choice.time_us = time_us;
  choice.first_us = first_us;
  choice.candidates = candidates;
  return te_jax::gemm::LoadAlgorithm({device, gemm}, choice);
}

}  // namespace

PYBIND11_MODULE(_te_jax_cuda, module) {
  module.doc() = "Custom-call handlers of te_jax for CUDA.";
  module.def("registrations", &Registrations, py::arg("command_buffers") = true,
             "{target name: handler capsule}, for jax.ffi.register_ffi_target. command_buffers: whether XLA may "
             "capture them in command buffers; what the first call says.");
  module.def("workspace_bytes", &WorkspaceBytes, py::arg("op"), py::arg("rows"), py::arg("cols"), py::arg("dbias"),
             py::arg("group_rows") = 0, py::arg("groups") = 0,
             "Bytes that the handler of \"quantize\", \"norm\", \"activation\" or \"activation_grad\" wants as "
             "workspace for a result [rows, cols] (in 1x128 blocks if group_rows, the last leading dimension, is "
             "given), of \"norm_grad\" (dbias: layernorm), or \"gemm\" for any.");
  module.def("types", &Types, "{type name: registration}, for jax.ffi.register_ffi_type, before the targets.");
  module.def("set_collective_board", &SetCollectiveBoard, py::arg("put"), py::arg("get"), py::arg("remove"),
             "Where the ranks of several processes tell each other things: put(key, value) -> None or why not, "
             "get(key, timeout_ms) -> value or None, remove(key). Before the first collective matmul.");
  module.def("collective_channels", &CollectiveChannels,
             "The ends of groups' channels in this process, a dict each: group, rank, device, arena_bytes.");
  module.def("collective_arena_bytes", &CollectiveArenaBytes, py::arg("ranks"), py::arg("slot_bytes"),
             "Bytes of device memory of an arena.");
  module.def("build_info", &BuildInfo,
             "How this module was built: FFI API version, architectures, compiler, CUDA and cuBLASLt header versions.");
  module.def("cublaslt_status", &CublasLtStatus,
             "Loads cuBLASLt: its version (None if it can't be loaded), its path, and why it can't.");
  module.def(
      "cublaslt_version",
      [] { return te_jax::gemm::LoadedCublasLt().error.empty() ? te_jax::gemm::LoadedCublasLt().get_version() : 0; },
      "The version of the cuBLASLt that is loaded at run time, e.g. 130100; 0 if it can't be loaded.");
  module.def("set_gemm_timing", &te_jax::gemm::SetTimed, py::arg("enabled"),
             "Whether the algorithms of GEMMs that come next are chosen by timing.");
  module.def("gemm_algorithms", &GemmAlgorithms, "The choices made by timing or loaded, a dict each.");
  module.def("load_gemm_algorithm", &LoadGemmAlgorithm, py::arg("device"), py::arg("gemm"), py::arg("algorithm"),
             py::arg("time_us"), py::arg("first_us"), py::arg("candidates"),
             "Takes a choice of another process; False if it is here already.");
}
