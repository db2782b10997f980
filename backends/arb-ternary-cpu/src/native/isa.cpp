#include "isa.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(ARB_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace arb {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avxvnni:
      return "avxvnni";
    case Isa::avx512vnni:
      return "avx512vnni";
    case Isa::neon:
      return "neon";
    case Isa::avx512bf16:
      return "avx512bf16";
    case Isa::amx:
      return "amx";
  }
  return "unknown";
}

#if defined(__x86_64__)

namespace {

// AVX-VNNI is in leaf 7, subleaf 1, which __builtin_cpu_supports of gcc 12 does not know.
bool has_avxvnni() {
  unsigned a = 7, b = 0, c = 1, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (a & (1u << 4)) != 0;
}

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

#if defined(ARB_HAVE_AMX)

// AMX-BF16, AMX-TILE and AMX-INT8 in leaf 7, which __builtin_cpu_supports of gcc 12 does not know, and whether the
// operating system saves both parts of a tile's state.
bool processor_has_amx() {
  constexpr unsigned kTileState = 3u << 17;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & (1u << 22)) == 0 || (d & (1u << 24)) == 0 || (d & (1u << 25)) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

// Linux hands out the registers of tiles to processes that ask: it refuses where a thread's stack for signals is too
// small to save them.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool has_amx() {
  static const bool usable = has_avx512bf16() && processor_has_amx() && may_use_tiles();
  return usable;
}

#endif

}  // namespace

#endif

std::vector<Isa> usable_isas() {
  std::vector<Isa> usable;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(ARB_HAVE_AMX)
  if (has_amx()) usable.push_back(Isa::amx);
#endif
#if defined(ARB_HAVE_AVX512BF16)
  if (has_avx512bf16()) usable.push_back(Isa::avx512bf16);
#endif
#if defined(ARB_HAVE_AVX512VNNI)
  if (has_avx512vnni()) usable.push_back(Isa::avx512vnni);
#endif
#if defined(ARB_HAVE_AVXVNNI)
  if (has_avx2() && has_avxvnni()) usable.push_back(Isa::avxvnni);
#endif
#if defined(ARB_HAVE_AVX2)
  if (has_avx2()) usable.push_back(Isa::avx2);
#endif
#elif defined(__aarch64__) && defined(ARB_HAVE_NEON)
#if defined(__linux__)
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) usable.push_back(Isa::neon);
#else
  usable.push_back(Isa::neon);  // every 64-bit Apple processor that runs Python 3.11 has dot products
#endif
#endif
  usable.push_back(Isa::scalar);
  return usable;
}

}  // namespace arb
