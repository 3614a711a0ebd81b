// Block scaling: every block of y is cast with the scale of its own amax (te_jax/quant/block_reference.py).
#include <algorithm>

#include "csrc/core/scale.h"
#include "csrc/cpu/quantized.h"

namespace te_jax::cpu {
namespace {

// At most 128 rows of y that lie in one group, as fp32, and where they are.
struct Tile {
  const float* values;  // [count, cols]
  int64_t count, cols;
  int64_t row;    // of y, the first one
  int64_t index;  // of all tiles
};

float ScaleOf(uint32_t amax_bits, const QuantizedOut& out) {
  return ScaleFromAmax(FloatOf(amax_bits), FP8Max(out.format), /*margin=*/0, out.power_of_two);
}

// data [rows, cols] in 1x128 blocks, scale_inv [column blocks, rows].
void WriteRows(const Tile& tile, int64_t rows, const QuantizedOut& out) {
  for (int64_t r = 0; r < tile.count; ++r) {
    const int64_t row = tile.row + r;
    for (int64_t block = 0; block < NumBlocks(tile.cols); ++block) {
      const float* values = tile.values + r * tile.cols + block * kBlock;
      const int64_t n = std::min(kBlock, tile.cols - block * kBlock);
      const float scale = ScaleOf(AmaxBits(values, n, 0), out);
      out.scale_inv[block * rows + row] = 1.0f / scale;
      EncodeRow(values, n, scale, out.format,
                static_cast<uint8_t*>(out.data) + row * tile.cols + block * kBlock);
    }
  }
}

template <typename Format>
void EncodeColumns(const Tile& tile, const float* scales, uint8_t* codes) {
  for (int64_t r = 0; r < tile.count; ++r) {
    const int64_t offset = r * tile.cols;
    for (int64_t c = 0; c < tile.cols; ++c) codes[offset + c] = Encode<Format>(tile.values[offset + c], scales[c]);
  }
}

// data_t [cols, padded rows] in 1x128 blocks, scale_inv_t [tiles, cols]. `codes` [128, cols] and `scales` [cols] are
// scratch.
void WriteColumns(const Tile& tile, int64_t rows, const QuantizedOut& out, float* scales, uint8_t* codes) {
  for (int64_t c = 0; c < tile.cols; ++c) {
    uint32_t amax = 0;
    for (int64_t r = 0; r < tile.count; ++r) {
      amax = std::max(amax, BitsOf(tile.values[r * tile.cols + c]) & 0x7fffffffu);
    }
    scales[c] = ScaleOf(amax, out);
    out.scale_inv_t[tile.index * tile.cols + c] = 1.0f / scales[c];
  }
  if (out.format == DType::kE5M2) {
    EncodeColumns<E5M2>(tile, scales, codes);
  } else {
    EncodeColumns<E4M3>(tile, scales, codes);
  }
  std::fill(codes + tile.count * tile.cols, codes + kBlock * tile.cols, uint8_t{0});  // the padding
  WriteTransposed(codes, kBlock, tile.index * kBlock, PaddedRows(rows, out), tile.cols,
                  static_cast<uint8_t*>(out.data_t));
}

// data and data_t with the same 128x128 blocks, scale_inv [row blocks, column blocks] and its transpose.
void WriteSquares(const Tile& tile, int64_t rows, const QuantizedOut& out, uint8_t* codes) {
  for (int64_t block = 0; block < NumBlocks(tile.cols); ++block) {
    const int64_t first = block * kBlock, n = std::min(kBlock, tile.cols - first);
    uint32_t amax = 0;
    for (int64_t r = 0; r < tile.count; ++r) amax = AmaxBits(tile.values + r * tile.cols + first, n, amax);
    const float scale = ScaleOf(amax, out);
    if (out.scale_inv != nullptr) out.scale_inv[tile.index * NumBlocks(tile.cols) + block] = 1.0f / scale;
    if (out.scale_inv_t != nullptr) out.scale_inv_t[block * NumBlocks(rows) + tile.index] = 1.0f / scale;
    for (int64_t r = 0; r < tile.count; ++r) {
      const int64_t offset = r * tile.cols + first;
      EncodeRow(tile.values + offset, n, scale, out.format, codes + offset);
    }
  }
  const int64_t size = tile.count * tile.cols;
  if (out.data != nullptr) std::copy(codes, codes + size, static_cast<uint8_t*>(out.data) + tile.row * tile.cols);
  if (out.data_t != nullptr) {
    WriteTransposed(codes, tile.count, tile.row, rows, tile.cols, static_cast<uint8_t*>(out.data_t));
  }
}

}  // namespace

bool WriteBlocks(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out) {
  const Scratch<float> values(kBlock * cols), scales(cols);
  const Scratch<uint8_t> codes(kBlock * cols);
  if (!values || !scales || !codes) return false;
  if (out.dbias != nullptr &&
      !Reduce(y, dtype, rows, cols, scales.get(), nullptr, out.dbias, out.dbias_dtype)) {
    return false;
  }
  int64_t index = 0;
  for (int64_t group = 0; group < rows; group += out.group_rows) {
    for (int64_t first = 0; first < out.group_rows; first += kBlock) {
      const int64_t count = std::min(kBlock, out.group_rows - first);
      LoadRow(y, dtype, (group + first) * cols, count * cols, values.get());
      const Tile tile{values.get(), count, cols, group + first, index++};
      if (out.scaling == Scaling::kBlock128x128) {
        WriteSquares(tile, rows, out, codes.get());
        continue;
      }
      if (out.data != nullptr) WriteRows(tile, rows, out);
      if (out.data_t != nullptr) WriteColumns(tile, rows, out, scales.get(), codes.get());
    }
  }
  return true;
}

}  // namespace te_jax::cpu
