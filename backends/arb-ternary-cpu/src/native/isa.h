// The instruction sets that kernels are written for, and which of them this processor runs.
#pragma once

#include <string>
#include <vector>

namespace arb {

enum class Isa : int { scalar = 0, avx2 = 1, avxvnni = 2, avx512vnni = 3, neon = 4, avx512bf16 = 5, amx = 6 };

constexpr int kIsaCount = 7;

const char* isa_name(Isa isa);

// Those that were compiled in and that the processor and the operating system support, the fastest first. `scalar` is
// always among them. The first call asks the operating system for the tiles of AMX, which it gives to a process and its
// threads on demand only.
std::vector<Isa> usable_isas();

}  // namespace arb
