// The end of a quantizing pass with a scale for each group.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "csrc/core/grouped_args.h"
#include "csrc/core/scale.h"
#include "csrc/cpu/quantized.h"

namespace te_jax::cpu {
namespace {

constexpr int64_t kTile = 32;  // rows that are cast before they are transposed together

// y [.., cols] and what is wanted of it.
struct Pass {
  const void* y;
  DType dtype;
  int64_t cols;
  const QuantizedOut& out;
  Scratch<float> row;
  Scratch<uint8_t> tile;  // FP8, where data isn't wanted

  Pass(const void* y, DType dtype, int64_t cols, const QuantizedOut& out)
      : y(y), dtype(dtype), cols(cols), out(out), row(cols), tile(out.data == nullptr ? kTile * cols : 0) {}
  explicit operator bool() const { return row && tile; }
};

// Rows [first, first + rows) of y, which become columns first_t onwards of data_t [cols, stride].
struct Group {
  int64_t number, first, rows;
  uint8_t* data_t;
  int64_t first_t, stride;
};

float AmaxOf(const Pass& pass, const Group& group) {
  uint32_t bits = 0;
  for (int64_t r = 0; r < group.rows; ++r) {
    LoadRow(pass.y, pass.dtype, (group.first + r) * pass.cols, pass.cols, pass.row.get());
    bits = AmaxBits(pass.row.get(), pass.cols, bits);
  }
  return FloatOf(bits);
}

void Cast(const Pass& pass, const Group& group, float scale) {
  const int64_t cols = pass.cols;
  for (int64_t begin = 0; begin < group.rows; begin += kTile) {
    const int64_t count = std::min(kTile, group.rows - begin), first = group.first + begin;
    uint8_t* tile = pass.out.data == nullptr ? pass.tile.get() : static_cast<uint8_t*>(pass.out.data) + first * cols;
    for (int64_t r = 0; r < count; ++r) {
      LoadRow(pass.y, pass.dtype, (first + r) * cols, cols, pass.row.get());
      EncodeRow(pass.row.get(), cols, scale, pass.out.format, tile + r * cols);
    }
    if (group.data_t == nullptr) continue;
    WriteTransposed(tile, count, group.first_t + begin, group.stride, cols, group.data_t);
  }
}

void QuantizeGroup(const Pass& pass, const Group& group) {
  const QuantizedOut& out = pass.out;
  const bool quantizes = out.data != nullptr || out.data_t != nullptr;
  float scale = out.scale[group.number], amax = 0.0f;
  if (out.amax != nullptr || (quantizes && scale == 0.0f)) amax = AmaxOf(pass, group);
  if (out.amax != nullptr) out.amax[group.number] = amax;
  if (!quantizes) return;
  if (scale == 0.0f) scale = ScaleFromAmax(amax, FP8Max(out.format), out.margin, out.power_of_two);
  if (!(scale > 0.0f)) scale = NAN;  // a broken state must be loud
  out.scale_used[group.number] = scale;
  out.scale_inv[group.number] = 1.0f / scale;
  Cast(pass, group, scale);
}

// Groups of equal size; each has a transposed copy of its own.
void QuantizeLeading(const Pass& pass, int64_t rows) {
  const int64_t size = rows / pass.out.groups;
  auto* data_t = static_cast<uint8_t*>(pass.out.data_t);
  for (int64_t g = 0; g < pass.out.groups; ++g) {
    QuantizeGroup(pass, {g, g * size, size, data_t == nullptr ? nullptr : data_t + g * pass.cols * size, 0, size});
  }
}

void QuantizeRagged(const Pass& pass, int64_t rows) {
  const int64_t stride = PaddedTokens(rows);
  auto* data_t = static_cast<uint8_t*>(pass.out.data_t);
  int64_t start = 0;
  for (int64_t g = 0; g < pass.out.groups; ++g) {
    const int64_t end = GroupEnd(start, pass.out.group_sizes[g], rows);
    QuantizeGroup(pass, {g, start, end - start, data_t, start, stride});
    start = end;
  }
  if (pass.out.data != nullptr) {
    std::memset(static_cast<uint8_t*>(pass.out.data) + start * pass.cols, 0,
                static_cast<size_t>((rows - start) * pass.cols));
  }
  for (int64_t c = 0; data_t != nullptr && c < pass.cols; ++c) {
    std::memset(data_t + c * stride + start, 0, static_cast<size_t>(stride - start));
  }
}

}  // namespace

bool WriteGroups(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out) {
  const Pass pass(y, dtype, cols, out);
  if (!pass) return false;
  if (out.group_sizes == nullptr) {
    QuantizeLeading(pass, rows);
  } else {
    QuantizeRagged(pass, rows);
  }
  return true;
}

}  // namespace te_jax::cpu
