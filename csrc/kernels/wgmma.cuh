// The asynchronous warpgroup matrix product of Hopper (sm_90a), for the operand types and shapes used here.
#ifndef TE_JAX_KERNELS_WGMMA_CUH_
#define TE_JAX_KERNELS_WGMMA_CUH_

#include <cstdint>

#include "csrc/core/args.h"

namespace te_jax::kernels::hopper {

// ---- tiles in shared memory, with the 128-byte swizzle, 1024-byte aligned ----
__device__ constexpr uint64_t TileDescriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{stride_bytes >> 4} << 32) | (uint64_t{leading_bytes >> 4} << 16) |
         ((address & 0x3ffff) >> 4);
}
// Rows of 128 bytes along the contraction. Steps along it are multiples of 32 bytes of the address.
__device__ inline uint64_t SwizzledTile(uint32_t address) { return TileDescriptor(address, 16, 1024); }
// A row of 128 bytes, 64 elements of 16 bits, for each index of the contraction. `box_bytes` from 64 columns to the
// next 64. Steps along the contraction are 16 rows.
__device__ inline uint64_t SwizzledTileTransposed(uint32_t address, uint32_t box_bytes) {
  return TileDescriptor(address, box_bytes, 1024);
}

__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of `d` across.
template <int kCount>
__device__ inline void Pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define TE_JAX_REGISTERS_64                                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                             \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                   \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                   \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TE_JAX_OPERANDS_64                                                                                             \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                      \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),                \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),              \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),              \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),              \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),              \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),              \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TE_JAX_REGISTERS_128                                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                             \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                   \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                   \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                   \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                   \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                   \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                       \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TE_JAX_OPERANDS_128                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                      \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),                \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),              \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),              \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),              \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),              \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),              \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),              \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),              \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),              \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),              \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),              \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),      \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),      \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// `registers` of d; a, b and accumulate are the operands that follow them.
#define TE_JAX_ISSUE_WGMMA(registers, a_operand, b_operand, accumulate_operand, shape_and_types, flags)                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_operand ", 0;\n"                                         \
               "wgmma.mma_async.sync.aligned." shape_and_types " {" TE_JAX_REGISTERS_##registers "}, " a_operand       \
               ", " b_operand ", p, 1, 1" flags ";\n}\n"                                                               \
               : TE_JAX_OPERANDS_##registers                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define TE_JAX_ISSUE_WGMMA_N(n, k_and_types, flags)                                                                    \
  do {                                                                                                                 \
    if constexpr (n == 128) TE_JAX_ISSUE_WGMMA(64, "%64", "%65", "%66", "m64n128" k_and_types, flags);                 \
    else TE_JAX_ISSUE_WGMMA(128, "%128", "%129", "%130", "m64n256" k_and_types, flags);                                \
  } while (false)

// d [64, kN] of a warpgroup = a * b^T, or += if `accumulate`: 32 bytes of each row of both, E4M3, E5M2 or BF16.
// kColumnsA, kColumnsB: that operand is a SwizzledTileTransposed, 16 rows of it (BF16 only).
template <DType kA, DType kB, int kN, bool kColumnsA = false, bool kColumnsB = false>
__device__ inline void Wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 128 || kN == 256);
  constexpr bool kBF16 = kA == DType::kBF16;
  static_assert(kBF16 == (kB == DType::kBF16) && (kBF16 || !(kColumnsA || kColumnsB)));
  if constexpr (kBF16) {
    static_assert(kColumnsB || !kColumnsA);
    if constexpr (kColumnsA) TE_JAX_ISSUE_WGMMA_N(kN, "k16.f32.bf16.bf16", ", 1, 1");
    else if constexpr (kColumnsB) TE_JAX_ISSUE_WGMMA_N(kN, "k16.f32.bf16.bf16", ", 0, 1");
    else TE_JAX_ISSUE_WGMMA_N(kN, "k16.f32.bf16.bf16", ", 0, 0");
  } else if constexpr (kA == DType::kE4M3) {
    if constexpr (kB == DType::kE4M3) TE_JAX_ISSUE_WGMMA_N(kN, "k32.f32.e4m3.e4m3", "");
    else TE_JAX_ISSUE_WGMMA_N(kN, "k32.f32.e4m3.e5m2", "");
  } else {
    static_assert(kB == DType::kE4M3);
    TE_JAX_ISSUE_WGMMA_N(kN, "k32.f32.e5m2.e4m3", "");
  }
}

#undef TE_JAX_ISSUE_WGMMA_N
#undef TE_JAX_ISSUE_WGMMA
#undef TE_JAX_OPERANDS_128
#undef TE_JAX_REGISTERS_128
#undef TE_JAX_OPERANDS_64
#undef TE_JAX_REGISTERS_64

}  // namespace te_jax::kernels::hopper

#endif  // TE_JAX_KERNELS_WGMMA_CUH_
