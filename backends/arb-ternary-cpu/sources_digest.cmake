# Writes OUT, a header with the digest of what the extension module is made of: SHA-256 of a line for each file of FROM,
# its own SHA-256 and its name. `arb_ternary_cpu/sources.py` computes the same.
file(GLOB names LIST_DIRECTORIES false RELATIVE "${FROM}" "${FROM}/*.cpp" "${FROM}/*.h")
list(SORT names)
set(lines "")
foreach(name IN LISTS names)
  file(SHA256 "${FROM}/${name}" digest)
  string(APPEND lines "${digest}  ${name}\n")
endforeach()
string(SHA256 digest "${lines}")
file(CONFIGURE OUTPUT "${OUT}" CONTENT "#define ARB_SOURCES \"@digest@\"\n" @ONLY)
