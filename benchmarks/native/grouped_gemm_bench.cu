// Checks the grouped products against fp64 ones on the GPU and times them beside a loop of cuBLASLt's, one for each
// group, whose sizes the host knows.
//
//   grouped_gemm_bench kernels                     prints the names of kernels
//   grouped_gemm_bench check [KERNEL]              one or all; exit status 1 if a result is wrong, 2 after a CUDA error
//   grouped_gemm_bench time GROUPSxTOKENSxKxN [SIZES [KERNEL]]
//                                                  K, N: features of x and of y; SIZES: grouped_gemm_problem.cuh;
//                                                  KERNEL: those whose names have it in them. One JSON line a product
//                                                  and implementation
//   grouped_gemm_bench sizes GROUPSxTOKENS SIZES   prints the sizes of groups that `time` takes
//
// Short runs after pauses, in another order each round: what power leaves of the clock differs with what ran before, so
// rates come with the clock they were measured at.
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "benchmarks/native/cublaslt.cuh"
#include "benchmarks/native/grouped_gemm_problem.cuh"

namespace {

using namespace te_jax;
using namespace te_jax::kernels;

constexpr DType kE4M3 = DType::kE4M3, kE5M2 = DType::kE5M2, kBF16 = DType::kBF16, kF32 = DType::kF32;

std::string NameOf(DType t) { return t == kE4M3 ? "e4m3" : t == kE5M2 ? "e5m2" : t == kBF16 ? "bf16" : "f32"; }
std::string KernelOf(const Case& c) {
  const std::string product = c.wgrad ? "wgrad" : c.contract_first ? "gemm_kn" : "gemm";
  if (c.lhs == kBF16) return product + "_bf16";
  return product + "_" + NameOf(c.lhs) + "_" + NameOf(c.rhs) + (c.fast ? "_fast" : "_precise");
}
std::string NameOf(const Case& c) {
  return KernelOf(c) + " " + NameOf(c.out) + (c.extra ? c.wgrad ? " +c" : " +bias" : "");
}

bool CheckCase(const Case& c, int seed) {
  std::printf("%-32s groups %4ld tokens %5ld k %5ld n %5ld %-8s ", NameOf(c).c_str(), long(c.groups), long(c.tokens),
              long(c.k), long(c.n), c.sizes.c_str());
  std::fflush(stdout);  // names the case that fails
  GroupedProblem problem(c, seed);
  problem.Prepare();
  problem.Launch();
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors e = Compare(problem, 1 << 20);
  // bf16 rounds by 2^-9 at most; FP8 products are added with some 13 bits below the largest, those of 128 in precise.
  const double l2 = c.lhs != kBF16 && c.fast ? 5e-3 : c.out == kF32 ? c.lhs == kBF16 ? 5e-6 : 3e-4 : 2.2e-3;
  const bool ok = e.guard && e.l2 < l2 && e.max < 8 * l2;
  std::printf("l2 %.2e  max %.2e%s%s\n", e.l2, e.max, e.guard ? "" : "  WRITES BEYOND", ok ? "" : "  WRONG");
  std::fflush(stdout);
  return ok;
}

// All kernels with all that they're asked to do beside the product.
std::vector<Case> Kinds() {
  std::vector<Case> kinds;
  for (DType out : {kBF16, kF32}) {
    const bool extra = out == kF32;
    for (const auto& [lhs, rhs] : {std::pair{kE4M3, kE4M3}, {kE5M2, kE4M3}, {kE4M3, kE5M2}})
      for (bool fast : {true, false})
        for (bool wgrad : {false, true}) kinds.push_back({wgrad, lhs, rhs, out, false, fast, extra});
    kinds.push_back({false, kBF16, kBF16, out, false, true, extra});
    kinds.push_back({false, kBF16, kBF16, out, true, true, extra});
    kinds.push_back({true, kBF16, kBF16, out, false, true, extra});
  }
  kinds.push_back({true, kBF16, kBF16, kBF16, false, true, true});
  kinds.push_back({false, kBF16, kBF16, kBF16, false, true, true});
  return kinds;
}

int Check(const std::string& kernel) {
  struct Shape {
    int64_t groups, tokens, k, n;
    const char* sizes;
  };
  const Shape shapes[] = {
      {1, 128, 128, 256, "uniform"},  {4, 512, 256, 512, "uniform"},  {4, 512, 256, 512, "skewed"},
      {5, 777, 272, 528, "short"},    {8, 1000, 512, 304, "sparse"},  {130, 1500, 144, 16, "sparse"},
      {1024, 3000, 64, 272, "skewed"}, {3, 1, 16, 16, "skewed"},      {4, 300, 128, 256, "none"},
      {6, 2000, 400, 784, "one"},     {7, 0, 64, 64, "none"},         {2, 1500, 272, 528, "skewed"},
  };
  int wrong = 0, seed = 0;
  for (const Shape& s : shapes) {
    for (Case c : Kinds()) {
      ++seed;
      if (!kernel.empty() && KernelOf(c) != kernel) continue;
      c.groups = s.groups, c.tokens = s.tokens, c.k = s.k, c.n = s.n, c.sizes = s.sizes;
      wrong += !CheckCase(c, seed);
    }
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}

// One cuBLASLt product for each group that isn't empty, the heuristic's first algorithm. In wgrad of FP8 the tokens of
// a group are rounded up to 16, which cuBLASLt needs, and lie somewhere in the operands; and all groups have the scales
// of the first one, since cuBLASLt takes only addresses of scales that are multiples of 16. There only time is of
// interest.
class Loop {
 public:
  Loop(CublasLt& lt, GroupedProblem& problem) : lt_(lt) {
    const Case& c = problem.what;
    const bool fp8 = c.lhs != kBF16;
    for (int64_t g = 0, padded_start = 0; g < c.groups; ++g) {
      const int64_t size = problem.sizes[g], start = problem.offsets[g];
      if (size == 0) continue;
      GemmArgs p;
      p.lhs_dtype = c.lhs, p.rhs_dtype = c.rhs, p.out_dtype = c.out;
      p.n = c.n;
      if (c.wgrad) {
        p.m = c.k;
        p.k = fp8 ? (size + 15) / 16 * 16 : size;
        p.lhs_contract_first = p.rhs_contract_first = !fp8;
        const int64_t last = PaddedTokens(c.tokens) - p.k, at = std::min(padded_start, last);
        p.lhs = At(problem.wgrad.lhs, (fp8 ? at : start) * p.m, c.lhs);
        p.rhs = At(problem.wgrad.rhs, (fp8 ? at : start) * p.n, c.rhs);
        padded_start += p.k;
        p.beta = c.extra ? 1 : 0;
        p.lhs_scale_inv = problem.wgrad.lhs_scale_inv;
        p.rhs_scale_inv = problem.wgrad.rhs_scale_inv;
        p.out = const_cast<void*>(At(problem.out, g * p.m * p.n, c.out));
      } else {
        p.m = size;
        p.k = c.k;
        p.rhs_contract_first = c.contract_first;
        p.lhs = At(problem.gemm.lhs, start * p.k, c.lhs);
        p.rhs = At(problem.gemm.rhs, g * p.n * p.k, c.rhs);
        p.lhs_scale_inv = problem.gemm.lhs_scale_inv;
        p.rhs_scale_inv = problem.gemm.rhs_scale_inv;
        p.out = const_cast<void*>(At(problem.out, start * p.n, c.out));
      }
      if (!fp8) p.lhs_scale_inv = p.rhs_scale_inv = nullptr;
      args_.push_back(p);
      plans_.push_back(lt.Prepare(p, false, c.fast));
      supported &= !plans_.back().algorithms.empty();
    }
  }
  void Launch() {
    for (size_t i = 0; i < args_.size(); ++i) lt_.Run(plans_[i], 0, args_[i]);
  }
  bool supported = true;

 private:
  static const void* At(const void* data, int64_t element, DType dtype) {
    return static_cast<const char*>(data) + element * BytesOf(dtype);
  }
  CublasLt& lt_;
  std::vector<GemmArgs> args_;
  std::vector<CublasLt::Plan> plans_;
};

constexpr int kSeed = 7;

struct Entry {
  std::string name;
  std::function<void()> run;
  std::vector<Stopwatch::Reading> readings = {};
};

void TimeCase(const Case& c) {
  constexpr int kRounds = 5;
  static CublasLt lt;
  static Stopwatch watch;
  GroupedProblem problem(c, kSeed);
  problem.Prepare();
  problem.Launch();
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors errors = Compare(problem, 64);
  Loop loop(lt, problem);
  std::vector<Entry> entries;
  entries.push_back({"ours", [&] { problem.Launch(); }});
  if (loop.supported) entries.push_back({"cublaslt_loop", [&] { loop.Launch(); }});

  std::mt19937 random(1);
  for (int round = -1; round < kRounds; ++round) {
    std::shuffle(entries.begin(), entries.end(), random);
    for (Entry& e : entries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      const double once = watch.Measure(1, [&](int) { e.run(); }).ms;
      const int times = std::max(2, std::min(20, static_cast<int>(5 / std::max(once, 1e-3))));
      const Stopwatch::Reading reading = watch.Measure(times, [&](int) { e.run(); });
      if (round >= 0) e.readings.push_back(reading);
    }
  }
  const double used = problem.offsets.back(), flops = 2.0 * used * c.n * c.k;
  for (Entry& e : entries) {
    std::sort(e.readings.begin(), e.readings.end(), [](const auto& a, const auto& b) { return a.ms < b.ms; });
    const auto [ms, mhz] = e.readings[e.readings.size() / 2];
    const double bytes = used * c.k * BytesOf(c.lhs) +
                         (c.wgrad ? used * c.n * BytesOf(c.rhs) + double(c.groups) * c.n * c.k * BytesOf(c.out)
                                  : used * c.n * BytesOf(c.out) + double(c.groups) * c.n * c.k * BytesOf(c.rhs));
    std::printf(
        "{\"product\": \"%s\", \"groups\": %ld, \"tokens\": %ld, \"k\": %ld, \"n\": %ld, \"sizes\": \"%s\", "
        "\"name\": \"%s\", \"ms\": %.4f, \"min_ms\": %.4f, \"max_ms\": %.4f, \"tflops\": %.0f, "
        "\"gb_per_s\": %.0f, \"mhz\": %.0f, "
        "\"l2\": %.2e, \"max\": %.2e}\n",
        NameOf(c).c_str(), long(c.groups), long(c.tokens), long(c.k), long(c.n), c.sizes.c_str(), e.name.c_str(), ms,
        e.readings.front().ms, e.readings.back().ms, flops / ms / 1e9, bytes / ms / 1e6, mhz, errors.l2, errors.max);
    std::fflush(stdout);
  }
}

void Time(int64_t groups, int64_t tokens, int64_t k, int64_t n, const std::string& sizes,
          const std::string& kernel) {
  std::vector<Case> cases = {
      {false, kBF16, kBF16, kBF16, true, true},    // fprop, kernels [k, n]
      {false, kBF16, kBF16, kBF16, false, true},   // dgrad
      {true, kBF16, kBF16, kBF16, false, true},    // wgrad
      {false, kE4M3, kE4M3, kBF16, false, true},   // fprop
      {false, kE5M2, kE4M3, kBF16, false, false},  // dgrad
      {true, kE4M3, kE5M2, kBF16, false, false},   // wgrad
      {true, kE4M3, kE5M2, kBF16, false, true},
      {true, kBF16, kBF16, kF32, false, true, true},
  };
  for (Case& c : cases) {
    if (KernelOf(c).find(kernel) == std::string::npos) continue;
    c.groups = groups, c.tokens = tokens, c.k = k, c.n = n, c.sizes = sizes;
    const bool dgrad = !c.wgrad && !c.contract_first && (c.lhs != kE4M3);
    if (dgrad) std::swap(c.k, c.n);
    TimeCase(c);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  long groups, tokens, k, n;
  if (mode == "kernels") {
    std::set<std::string> names;
    for (const Case& c : Kinds()) names.insert(KernelOf(c));
    for (const std::string& name : names) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (mode == "check") return Check(argc > 2 ? argv[2] : "");
  if (mode == "time" && argc > 2 && std::sscanf(argv[2], "%ldx%ldx%ldx%ld", &groups, &tokens, &k, &n) == 4) {
    Time(groups, tokens, k, n, argc > 3 ? argv[3] : "skewed", argc > 4 ? argv[4] : "");
    return 0;
  }
  if (mode == "sizes" && argc == 4 && std::sscanf(argv[2], "%ldx%ld", &groups, &tokens) == 2) {
    for (int32_t size : GroupSizes(argv[3], tokens, groups, kSeed)) std::printf("%d ", size);
    std::printf("\n");
    return 0;
  }
  std::fprintf(stderr, "usage: %s kernels | check [KERNEL] | time GROUPSxTOKENSxKxN [SIZES [KERNEL]] | "
               "sizes GROUPSxTOKENS SIZES\n", argv[0]);
  return 2;
}
