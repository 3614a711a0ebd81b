// The end of every quantizing pass: y [rows, cols], already rounded to its dtype, becomes the wanted results.
#ifndef TE_JAX_CPU_QUANTIZED_H_
#define TE_JAX_CPU_QUANTIZED_H_

#include <cstdint>

#include "csrc/core/args.h"
#include "csrc/cpu/rows.h"

namespace te_jax::cpu {

// Writes all results but hp, which is y itself. False where scratch memory can't be had.
[[nodiscard]] bool WriteQuantized(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out);

// The same in block scaling (csrc/cpu/blocks.cc).
[[nodiscard]] bool WriteBlocks(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out);

// The same with a scale for each group (csrc/cpu/groups.cc).
[[nodiscard]] bool WriteGroups(const void* y, DType dtype, int64_t rows, int64_t cols, const QuantizedOut& out);

// amax and the column sums, those that are wanted, in one pass over y. `row` is scratch for [cols].
[[nodiscard]] bool Reduce(const void* y, DType dtype, int64_t rows, int64_t cols, float* row, float* amax,
                          void* dbias, DType dbias_dtype);

// data_t [cols, rows]: the `count` rows of `tile` [count, cols] become its columns first_row onwards.
void WriteTransposed(const uint8_t* tile, int64_t count, int64_t first_row, int64_t rows, int64_t cols,
                     uint8_t* data_t);

// A pass with `if_unseeded` whose scale is given reads nothing: writes amax = 0 and returns true.
bool SkipSeeded(const QuantizedOut& out);

// out[0..n) = cast(clamp(row * scale)).
void EncodeRow(const float* row, int64_t n, float scale, DType format, uint8_t* out);

// max |row|, as the bits of a float: NaN is above infinity, so that it wins. `previous` is the maximum so far.
uint32_t AmaxBits(const float* row, int64_t n, uint32_t previous);

// Runs `produce(row, out [cols])` for every row, stores the rounded results (in hp if it is wanted) and writes the
// rest.
template <typename Produce>
[[nodiscard]] bool ProduceAndWrite(int64_t rows, int64_t cols, DType dtype, const QuantizedOut& out, Produce produce) {
  const Scratch<float> row(cols);
  const Scratch<uint8_t> own(out.hp == nullptr ? rows * cols * SizeOf(dtype) : 0);
  if (!row || !own) return false;
  void* y = out.hp == nullptr ? own.get() : out.hp;
  for (int64_t r = 0; r < rows; ++r) {
    produce(r, row.get());
    StoreRow(row.get(), cols, dtype, y, r * cols);
  }
  return WriteQuantized(y, dtype, rows, cols, out);
}

}  // namespace te_jax::cpu

#endif  // TE_JAX_CPU_QUANTIZED_H_
