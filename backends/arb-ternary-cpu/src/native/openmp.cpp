#include "openmp.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>
#endif

namespace arb {

namespace {

#if defined(__linux__)
int find_torch(dl_phdr_info* info, size_t, void* found) {
  const char* const name = std::strrchr(info->dlpi_name, '/');
  if (name == nullptr || std::strcmp(name, "/libtorch_cpu.so") != 0) return 0;
  *static_cast<std::string*>(found) = info->dlpi_name;
  return 1;
}

OpenMp find_openmp() {
  std::string path;
  if (dl_iterate_phdr(find_torch, &path) == 0) return nullptr;
  // Not loaded anew; the handle is kept, so that the library stays.
  void* const torch = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return nullptr;
  // Looks through the libraries that it depends on, whatever they are called.
  return reinterpret_cast<OpenMp>(dlsym(torch, "GOMP_parallel"));
}
#else
OpenMp find_openmp() { return nullptr; }
#endif

}  // namespace

OpenMp torch_openmp() {
  static const OpenMp found = find_openmp();
  return found;
}

}  // namespace arb
