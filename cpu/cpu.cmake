# Sources of the CPU device, one object library per instruction set. No global -march: a file gets its ISA by its suffix,
#   cpu/*.cpp, kernels/<op>.cpp   baseline x86-64
#   kernels/<op>_avx2.cpp         AVX2+FMA+F16C                  LS_SIMD_AVX2
#   kernels/<op>_avx512.cpp       AVX-512 F, BW, VL, DQ          LS_SIMD_AVX512
#   kernels/<op>_avx512vnni.cpp   the same + VNNI                LS_SIMD_AVX512 LS_SIMD_VNNI
#   kernels/<op>_amx.cpp          the same + BF16, AMX           LS_SIMD_AVX512 LS_SIMD_AMX
#   kernels/<op>_emu512.cpp       tests only: the 16-lane source on two AVX2 registers        LS_SIMD_EMU512
#   kernels/<op>_emuamx.cpp       tests only: the tile source on a plain C++ tile unit        LS_SIMD_EMU512 LS_SIMD_AMX
# Result: LS_CPU_SOURCES (baseline files), LS_CPU_OBJECTS (link these), LS_CPU_TEST_OBJECTS (link these too in tests), LS_CPU_TESTS (test sources).
set(LS_CPU_DIR ${CMAKE_CURRENT_LIST_DIR})
file(GLOB LS_CPU_SOURCES CONFIGURE_DEPENDS ${LS_CPU_DIR}/*.cpp ${LS_CPU_DIR}/kernels/*.cpp)
list(FILTER LS_CPU_SOURCES EXCLUDE REGEX "/kernels/[^/]*_(avx2|avx512|avx512vnni|amx|emu512|emuamx)\\.cpp$")
file(GLOB LS_CPU_TESTS CONFIGURE_DEPENDS ${LS_CPU_DIR}/test/*_test.cpp)

set(LS_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c -DLS_SIMD_AVX2)
# GCC 12 calls the deliberately undefined sources inside its own AVX-512 intrinsics uninitialised; the avx2 and emu512 units compile the same code with that warning on.
set(LS_CPU_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized -DLS_SIMD_AVX512)
set(LS_CPU_FLAGS_avx512vnni ${LS_CPU_FLAGS_avx512} -mavx512vnni -DLS_SIMD_VNNI)
set(LS_CPU_FLAGS_amx ${LS_CPU_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8 -DLS_SIMD_AMX)
set(LS_CPU_FLAGS_emu512 -mavx2 -mfma -mf16c -DLS_SIMD_EMU512)
set(LS_CPU_FLAGS_emuamx ${LS_CPU_FLAGS_emu512} -DLS_SIMD_AMX)

function(ls_cpu_object_library name)
  add_library(${name} OBJECT ${ARGN})
  target_compile_features(${name} PRIVATE cxx_std_20)
  # Sums have one order on every build: the compiler may not fuse or reorder; fma is spelled out.
  target_compile_options(${name} PRIVATE -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fvisibility=hidden)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

ls_cpu_object_library(ls_cpu_base ${LS_CPU_SOURCES})
set(LS_CPU_OBJECTS $<TARGET_OBJECTS:ls_cpu_base>)
set(LS_CPU_TEST_OBJECTS "")
foreach(isa avx2 avx512 avx512vnni amx emu512 emuamx)
  file(GLOB sources CONFIGURE_DEPENDS ${LS_CPU_DIR}/kernels/*_${isa}.cpp)
  if(sources)
    ls_cpu_object_library(ls_cpu_${isa} ${sources})
    target_compile_options(ls_cpu_${isa} PRIVATE ${LS_CPU_FLAGS_${isa}})
    if(isa MATCHES "^emu")
      set_target_properties(ls_cpu_${isa} PROPERTIES EXCLUDE_FROM_ALL ON)
      list(APPEND LS_CPU_TEST_OBJECTS $<TARGET_OBJECTS:ls_cpu_${isa}>)
    else()
      list(APPEND LS_CPU_OBJECTS $<TARGET_OBJECTS:ls_cpu_${isa}>)
    endif()
  endif()
endforeach()
