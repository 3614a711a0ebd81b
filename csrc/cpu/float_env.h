// XLA's CPU threads flush subnormal floats to zero. The kernels' results must not depend on that (a GPU keeps them),
// so it is off while one runs.
#ifndef TE_JAX_CPU_FLOAT_ENV_H_
#define TE_JAX_CPU_FLOAT_ENV_H_

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace te_jax::cpu {

class KeepSubnormals {
 public:
  KeepSubnormals() : saved_(Get()) { Set(saved_ & ~kFlushBits); }
  ~KeepSubnormals() { Set(saved_); }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  using Register = uint32_t;
  static constexpr Register kFlushBits = 0x8040;  // flush-to-zero, denormals-are-zero
  static Register Get() { return _mm_getcsr(); }
  static void Set(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlushBits = Register{1} << 24;  // FPCR.FZ
  static Register Get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void Set(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kFlushBits = 0;
  static Register Get() { return 0; }
  static void Set(Register) {}
#endif
  Register saved_;
};

}  // namespace te_jax::cpu

#endif  // TE_JAX_CPU_FLOAT_ENV_H_
