#include "csrc/cpu/quantized.h"

#include <algorithm>
#include <cmath>

#include "csrc/core/scale.h"
#include "csrc/cpu/kernels.h"

namespace te_jax::cpu {
namespace {

// Rows that are cast before they are transposed together: 8 for the transposition, as often as stays in the L1 cache.
constexpr int64_t kTile = 32;

// Transposes 8 x 8 bytes: byte j of `rows[i]` and byte i of `rows[j]` change places, by swapping ever smaller blocks.
void Transpose8x8(uint64_t rows[8]) {
  const auto swap = [&](int distance, uint64_t mask) {
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const int shift = 8 * distance;
      const uint64_t moved = ((rows[i] >> shift) ^ rows[i + distance]) & mask;
      rows[i] ^= moved << shift;
      rows[i + distance] ^= moved;
    }
  };
  swap(4, 0x00000000ffffffffull);
  swap(2, 0x0000ffff0000ffffull);
  swap(1, 0x00ff00ff00ff00ffull);
}

[[nodiscard]] bool Cast(const void* y, DType dtype, int64_t rows, int64_t cols, float* row, float scale,
                        const QuantizedOut& out) {
  const Scratch<uint8_t> own(out.data == nullptr ? kTile * cols : 0);
  if (!own) return false;
  for (int64_t first = 0; first < rows; first += kTile) {
    const int64_t count = std::min(kTile, rows - first);
    uint8_t* tile = out.data == nullptr ? own.get() : static_cast<uint8_t*>(out.data) + first * cols;
    for (int64_t r = 0; r < count; ++r) {
      LoadRow(y, dtype, (first + r) * cols, cols, row);
      EncodeRow(row, cols, scale, out.format, tile + r * cols);
    }
    if (out.data_t != nullptr) {
      WriteTransposed(tile, count, first, rows, cols, static_cast<uint8_t*>(out.data_t));
    }
  }
  return true;
}

}  // namespace

void WriteTransposed(const uint8_t* tile, int64_t count, int64_t first_row, int64_t rows, int64_t cols,
                     uint8_t* data_t) {
  const int64_t full_rows = count / 8 * 8, full_cols = cols / 8 * 8;
  for (int64_t c = 0; c < full_cols; c += 8) {
    for (int64_t r = 0; r < full_rows; r += 8) {
      uint64_t block[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&block[i], tile + (r + i) * cols + c, 8);
      Transpose8x8(block);
      for (int i = 0; i < 8; ++i) std::memcpy(data_t + (c + i) * rows + first_row + r, &block[i], 8);
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = c < full_cols ? full_rows : 0; r < count; ++r) {
      data_t[c * rows + first_row + r] = tile[r * cols + c];
    }
  }
}

bool Reduce(const void* y, DType dtype, int64_t rows, int64_t cols, float* row, float* amax, void* dbias,
            DType dbias_dtype) {
  const Scratch<double> sums(dbias != nullptr ? cols : 0);
  if (!sums) return false;
  if (dbias != nullptr) std::fill(sums.get(), sums.get() + cols, 0.0);
  uint32_t bits = 0;
  for (int64_t r = 0; r < rows; ++r) {
    LoadRow(y, dtype, r * cols, cols, row);
    if (amax != nullptr) bits = AmaxBits(row, cols, bits);
    if (dbias != nullptr) {
      for (int64_t c = 0; c < cols; ++c) sums.get()[c] += row[c];
    }
  }
  if (amax != nullptr) *amax = FloatOf(bits);
  if (dbias != nullptr) {
    for (int64_t c = 0; c < cols; ++c) row[c] = static_cast<float>(sums.get()[c]);
    StoreRow(row, cols, dbias_dtype, dbias, 0);
  }
  return true;
}

uint32_t AmaxBits(const float* row, int64_t n, uint32_t previous) {
  int32_t max = static_cast<int32_t>(previous);  // signed: baseline x86-64 compares no unsigned vectors
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(BitsOf(row[i]) & 0x7fffffffu);
    max = magnitude > max ? magnitude : max;
  }
  return static_cast<uint32_t>(max);
}

void EncodeRow(const float* row, int64_t n, float scale, DType format, uint8_t* out) {
  if (format == DType::kE5M2) {
    for (int64_t i = 0; i < n; ++i) out[i] = Encode<E5M2>(row[i], scale);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = Encode<E4M3>(row[i], scale);
  }
}

bool SkipSeeded(const QuantizedOut& out) {
  if (!out.if_unseeded || out.groups > 0 || *out.scale == 0.0f) return false;
  if (out.amax != nullptr) *out.amax = 0.0f;
  return true;
}

bool WriteQuantized(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out) {
  if (out.scaling != Scaling::kTensor) return WriteBlocks(y, dtype, rows, cols, out);
  if (out.groups > 0) return WriteGroups(y, dtype, rows, cols, out);
  const Scratch<float> row(cols);
  if (!row) return false;
  const bool quantizes = out.data != nullptr || out.data_t != nullptr;
  const bool unseeded = *out.scale == 0.0f;
  float own_amax = 0.0f;
  float* amax = out.amax == nullptr && quantizes && unseeded ? &own_amax : out.amax;
  if (amax != nullptr || out.dbias != nullptr) {
    if (!Reduce(y, dtype, rows, cols, row.get(), amax, out.dbias, out.dbias_dtype)) return false;
  }
  if (!quantizes) return true;

  float scale = *out.scale;
  if (unseeded) scale = ScaleFromAmax(*amax, FP8Max(out.format), out.margin, out.power_of_two);
  if (!(scale > 0.0f)) scale = NAN;  // a broken state must be loud
  *out.scale_used = scale;
  *out.scale_inv = 1.0f / scale;
  return Cast(y, dtype, rows, cols, row.get(), scale, out);
}

bool Quantize(const QuantizeArgs& args) {
  if (SkipSeeded(args.out)) return true;
  return WriteQuantized(args.x, args.x_dtype, args.rows, args.cols, args.out);
}

bool Dequantize(const DequantizeArgs& args) {
  constexpr int64_t kBlock = 4096;
  const DecodeTable& table = TableOf(args.in_dtype);
  const uint8_t* data = static_cast<const uint8_t*>(args.data);
  float block[kBlock];
  for (int64_t first = 0; first < args.size; first += kBlock) {
    const int64_t n = std::min(kBlock, args.size - first);
    for (int64_t i = 0; i < n; ++i) block[i] = table[data[first + i]] * *args.scale_inv;
    StoreRow(block, n, args.out_dtype, args.out, first);
  }
  return true;
}

}  // namespace te_jax::cpu
