// Which configurations of the block-scaled product are used: what the kernel is compiled for, and what
// csrc/gemm/plan_block.cc counts tiles by. Plain C++.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_TILING_H_
#define TE_JAX_KERNELS_BLOCK_GEMM_TILING_H_

namespace te_jax::kernels {

// csrc/kernels/block_gemm_config.cuh says what each is.
struct BlockGemmTiling {
  int groups, waves, stages, cluster;
  bool share_a;
  int partials, ahead;
  bool ordered;
  int raster;  // tiles (of clusters) along M that are worked on together

  // Rows and columns of the result that a cluster works on at a time.
  constexpr int Rows() const { return groups * waves * 64 * (share_a ? 1 : cluster); }
  constexpr int Columns() const { return 128 * (share_a ? cluster : 1); }
};

// For a b scaled by 128 x 128 blocks, and by 1 x 128 ones. Both from measurements (docs/design/0003).
inline constexpr BlockGemmTiling kTilingByBlocks{2, 2, 4, 2, true, 1, 0, false, 8};
inline constexpr BlockGemmTiling kTilingByVectors{2, 1, 6, 2, true, 2, 0, false, 16};

constexpr BlockGemmTiling TilingOf(bool vector_b) { return vector_b ? kTilingByVectors : kTilingByBlocks; }

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_TILING_H_
