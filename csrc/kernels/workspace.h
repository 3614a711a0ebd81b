// The scratch memory of a quantizing pass and what it holds. Plain C++: handlers ask for the size, kernels for the
// places.
#ifndef TE_JAX_KERNELS_WORKSPACE_H_
#define TE_JAX_KERNELS_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "csrc/core/args.h"
#include "csrc/core/scale.h"

namespace te_jax::kernels {

// Blocks of the amax kernels at most: four per multiprocessor of an H200, and two words for each thread that reduces
// them.
constexpr int kMaxPartials = 512;

// The tile that a block works on. 128 rows: a transposed tile has 128-byte rows, whole cache lines.
constexpr int kTileRows = 128;
constexpr int kTileCols = 64;
TE_JAX_HOST_DEVICE constexpr int64_t NumRowTiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
TE_JAX_HOST_DEVICE constexpr int64_t NumColTiles(int64_t cols) { return (cols + kTileCols - 1) / kTileCols; }

// Rows of 128 x 128 tiles of a pass in block scaling: none lies in two groups.
inline int64_t BlockRowTiles(int64_t rows, const QuantizedOut& out) {
  return rows / out.group_rows * NumBlocks(out.group_rows);
}

inline bool Quantizes(const QuantizedOut& out) { return out.data != nullptr || out.data_t != nullptr; }
inline bool WritesTiles(const QuantizedOut& out) { return Quantizes(out) || out.hp != nullptr || out.dbias != nullptr; }

// What has to be known of the amax before anything is written.
enum class AmaxNeed {
  kNone,
  kZero,        // nothing, but the kernel that writes accumulates into amax, which must be 0
  kIfUnseeded,  // the amax, if the scale operand is 0
  kAlways,
};
inline AmaxNeed NeedOfAmax(const QuantizedOut& out) {
  if (out.scaling != Scaling::kTensor) return AmaxNeed::kNone;  // every block finds its own
  if (Quantizes(out)) return AmaxNeed::kIfUnseeded;
  if (out.amax == nullptr) return AmaxNeed::kNone;
  if (WritesTiles(out)) return AmaxNeed::kZero;
  return out.if_unseeded ? AmaxNeed::kIfUnseeded : AmaxNeed::kAlways;
}

struct PassWorkspace {
  uint32_t* partials = nullptr;  // [kMaxPartials]
  int num_partials = 0;
  float* tile_sums = nullptr;    // [row tiles, cols], if dbias is wanted
  float* mean = nullptr;         // [rows], norms only
  float* rstd = nullptr;         // [rows], norms only

  // `cols` is the number of columns of the result.
  PassWorkspace(int64_t rows, int64_t cols, const QuantizedOut& out, void* memory) {
    char* next = static_cast<char*>(memory);
    partials = reinterpret_cast<uint32_t*>(next);
    next += kMaxPartials * sizeof(uint32_t);
    tile_sums = reinterpret_cast<float*>(next);
    if (out.dbias != nullptr) next += NumTiles(rows, out) * cols * sizeof(float);
    mean = reinterpret_cast<float*>(next);
    rstd = mean + rows;
  }
  static int64_t NumTiles(int64_t rows, const QuantizedOut& out) {
    return out.scaling == Scaling::kTensor ? NumRowTiles(rows) : BlockRowTiles(rows, out);
  }
  static size_t Bytes(int64_t rows, int64_t cols, const QuantizedOut& out, bool norm = false) {
    // The end and the maximum of each group, and a word (group_pass.cuh).
    if (out.groups > 0) return out.groups * (sizeof(int64_t) + sizeof(uint32_t)) + sizeof(uint32_t);
    return kMaxPartials * sizeof(uint32_t) + (out.dbias == nullptr ? 0 : NumTiles(rows, out) * cols * sizeof(float)) +
           (norm ? 2 * rows * sizeof(float) : 0);
  }
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_WORKSPACE_H_
