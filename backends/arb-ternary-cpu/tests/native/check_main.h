// How a check begins: by a fuzzer, or with a number of rounds and the first seed. Included last, behind its `round`. One
// that has more to say than that it is through defines ARB_CHECK_END, a statement, before.
#pragma once

#include "rounds.h"

#if defined(ARB_FUZZ)
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  arb::prepare_threads();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { return fuzz_round(round, data, size); }
#else
int main(int argc, char** argv) {
  const int status = run_rounds(round, argc, argv);
#if defined(ARB_CHECK_END)
  ARB_CHECK_END;
#endif
  return status;
}
#endif
