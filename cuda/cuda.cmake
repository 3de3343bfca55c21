# The CUDA device, included by native/CMakeLists.txt when LS_CUDA_TOOLKIT names a toolkit (bin/nvcc, include, lib). Sources:
#   *.cpp, kernels/*.cpp   host code; *_cuda.cpp only in the real library
#   kernels/*.cu           kernels and their launchers: nvcc for the real library, g++ for the simulator
#   sim/*.cpp              the simulator and a runtime over it
#   test/*_test.cpp        tests; those in test/ranks need the simulator, the others run on a GPU too
# Targets: layerscale_cuda (the library), layerscale_cuda_sim (the same ABI, kernels simulated), cuda_tests (test/*_test.cpp over the simulator),
#   cuda_gpu_programs (the tests and the benchmark for a machine with a GPU, of which only that they link can be told here).
set(LS_CUDA_DIR ${CMAKE_CURRENT_LIST_DIR})
file(GLOB LS_CUDA_HOST CONFIGURE_DEPENDS ${LS_CUDA_DIR}/*.cpp ${LS_CUDA_DIR}/kernels/*.cpp)
set(LS_CUDA_REAL ${LS_CUDA_HOST})
list(FILTER LS_CUDA_REAL INCLUDE REGEX "_cuda\\.cpp$")
list(FILTER LS_CUDA_HOST EXCLUDE REGEX "_cuda\\.cpp$")
file(GLOB LS_CUDA_KERNELS CONFIGURE_DEPENDS ${LS_CUDA_DIR}/kernels/*.cu)
file(GLOB LS_CUDA_SIM CONFIGURE_DEPENDS ${LS_CUDA_DIR}/sim/*.cpp)
file(GLOB LS_CUDA_TESTS CONFIGURE_DEPENDS ${LS_CUDA_DIR}/test/*_test.cpp ${LS_CUDA_DIR}/test/ranks/*_test.cpp)
file(GLOB LS_CUDA_TEST_SUPPORT CONFIGURE_DEPENDS ${LS_CUDA_DIR}/test/*.cpp)
list(FILTER LS_CUDA_TEST_SUPPORT EXCLUDE REGEX "_test\\.cpp$")

function(ls_cuda_objects name)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE ${LS_CUDA_TOOLKIT}/include)
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  # As nvcc has it on the host; kernels say where they want a fused multiply-add.
  target_compile_options(${name} PRIVATE -ffp-contract=off)
endfunction()

# Host code is the same in both libraries.
ls_cuda_objects(ls_cuda_host ${LS_CUDA_HOST})
ls_cuda_objects(ls_cuda_sim ${LS_CUDA_SIM} ${LS_CUDA_KERNELS})
set_source_files_properties(${LS_CUDA_KERNELS} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
set(LS_CUDA_SIM_OBJECTS $<TARGET_OBJECTS:ls_cuda_host> $<TARGET_OBJECTS:ls_cuda_sim>)

# What tests compare with: the operations of the CPU device, without its backend.
ls_cpu_object_library(ls_cuda_test_cpu ${LS_CPU_DIR}/sampler.cpp ${LS_CPU_DIR}/ops.cpp ${LS_CPU_DIR}/isa.cpp ${LS_CPU_DIR}/thread_pool.cpp)
set(LS_CUDA_TEST_CPU $<TARGET_OBJECTS:ls_cuda_test_cpu> $<TARGET_OBJECTS:ls_cpu_avx2> $<TARGET_OBJECTS:ls_cpu_avx512>)

# Objects of tests, compiled once: each test is a program, and all are one more.
function(ls_cuda_test_objects name)
  ls_cuda_objects(${name} ${ARGN})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/test ${LS_CUDA_DIR} ${LS_CUDA_DIR}/test)
endfunction()
function(ls_cuda_program name)
  add_executable(${name} ${ARGN} $<TARGET_OBJECTS:layerscale_core>)
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/test ${LS_CUDA_DIR} ${LS_CUDA_DIR}/test)
  target_include_directories(${name} SYSTEM PRIVATE ${LS_CUDA_TOOLKIT}/include)
  target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

add_custom_target(cuda_tests)

# Stands in for NCCL over the simulator; loaded by path, as the real one is by name.
foreach(variant fake_nccl fake_nccl_incomplete)
  add_library(${variant} SHARED ${LS_CUDA_DIR}/test/ranks/fake_nccl.cpp)
  target_link_libraries(${variant} PRIVATE Threads::Threads)
  add_dependencies(cuda_tests ${variant})
endforeach()
target_compile_definitions(fake_nccl_incomplete PRIVATE FAKE_NCCL_INCOMPLETE)
ls_cuda_test_objects(ls_cuda_test_support ${LS_CUDA_TEST_SUPPORT})
set(LS_CUDA_TEST_OBJECTS $<TARGET_OBJECTS:ls_cuda_test_support>)
foreach(source ${LS_CUDA_TESTS})
  get_filename_component(name ${source} NAME_WE)
  ls_cuda_test_objects(ls_cuda_${name} ${source})
  if(NOT source MATCHES "/ranks/")
    list(APPEND LS_CUDA_TEST_OBJECTS $<TARGET_OBJECTS:ls_cuda_${name}>)
  endif()
  ls_cuda_program(cuda_${name} $<TARGET_OBJECTS:ls_cuda_${name}> $<TARGET_OBJECTS:ls_cuda_test_support> ${LS_CUDA_SIM_OBJECTS} ${LS_CUDA_TEST_CPU})
  target_link_libraries(cuda_${name} PRIVATE layerscale_test_main)
  add_dependencies(cuda_tests cuda_${name})
  add_test(NAME cuda_${name} COMMAND cuda_${name})
endforeach()
add_dependencies(cuda_nccl_test fake_nccl fake_nccl_incomplete)

ls_device_library(layerscale_cuda_sim ${LS_CUDA_SIM_OBJECTS})
target_link_libraries(layerscale_cuda_sim PRIVATE ${CMAKE_DL_LIBS})
add_dependencies(cuda_tests layerscale_cuda_sim)

# nvcc, one call a kernel file for all architectures. What ptxas says of registers and spills is kept beside the object.
set(LS_CUDA_ARCHS -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100f,code=sm_100
    -gencode arch=compute_120,code=sm_120 -gencode arch=compute_120,code=compute_120)
set(LS_CUDA_OBJECTS "")
file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/nvcc)
foreach(source ${LS_CUDA_KERNELS})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/nvcc/${name}.o)
  add_custom_command(OUTPUT ${object} DEPENDS ${source} DEPFILE ${object}.d VERBATIM
    COMMAND ${CMAKE_COMMAND} -DOBJECT=${object} -P ${LS_CUDA_DIR}/nvcc.cmake --
            ${LS_CUDA_TOOLKIT}/bin/nvcc -std=c++20 -O3 ${LS_CUDA_ARCHS} -cudart static -lineinfo --expt-relaxed-constexpr -Werror all-warnings --resource-usage
            -Xcompiler -Wall,-Wextra,-Werror,-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden -ccbin ${CMAKE_CXX_COMPILER}
            -I ${CMAKE_CURRENT_SOURCE_DIR} -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
    COMMENT "nvcc ${name}.cu")
  list(APPEND LS_CUDA_OBJECTS ${object})
endforeach()
ls_cuda_objects(ls_cuda_real ${LS_CUDA_REAL})
ls_device_library(layerscale_cuda $<TARGET_OBJECTS:ls_cuda_host> $<TARGET_OBJECTS:ls_cuda_real> ${LS_CUDA_OBJECTS})
target_link_libraries(layerscale_cuda PRIVATE ${LS_CUDA_TOOLKIT}/lib/libcudart_static.a ${CMAKE_DL_LIBS} rt)
# Not part of `all`: the tests under AddressSanitizer have no use for it.
set_target_properties(layerscale_cuda PROPERTIES EXCLUDE_FROM_ALL ON)

# What times steps, over the simulator too: on a model of a few weights, so that it is known to work.
ls_cuda_program(cuda_step_bench ${LS_CUDA_DIR}/bench/step_bench.cpp ${LS_CUDA_SIM_OBJECTS})
add_dependencies(cuda_tests cuda_step_bench)
add_test(NAME cuda_step_bench COMMAND cuda_step_bench tiny 4)
# For bench/gpu.sh: all tests of one GPU as one program, a case a call, and the same for a GPU.
ls_cuda_program(cuda_sim_checks ${LS_CUDA_DIR}/test/gpu/main.cpp ${LS_CUDA_TEST_OBJECTS} ${LS_CUDA_SIM_OBJECTS} ${LS_CUDA_TEST_CPU})
add_dependencies(cuda_tests cuda_sim_checks)

set(LS_CUDA_GPU_TESTS ${LS_CUDA_TESTS} ${LS_CUDA_TEST_SUPPORT})
list(FILTER LS_CUDA_GPU_TESTS EXCLUDE REGEX "/simulator_test\\.cpp$|/ranks/")
ls_cuda_test_objects(ls_cuda_gpu_tests ${LS_CUDA_GPU_TESTS} ${LS_CUDA_DIR}/test/gpu/main.cpp)
target_compile_definitions(ls_cuda_gpu_tests PRIVATE LS_TEST_GPU)
set(LS_CUDA_GPU_OBJECTS $<TARGET_OBJECTS:ls_cuda_host> $<TARGET_OBJECTS:ls_cuda_real> ${LS_CUDA_OBJECTS} ${LS_CUDA_TOOLKIT}/lib/libcudart_static.a rt)
ls_cuda_program(cuda_gpu_checks $<TARGET_OBJECTS:ls_cuda_gpu_tests> ${LS_CUDA_TEST_CPU})
ls_cuda_program(cuda_gpu_step_bench ${LS_CUDA_DIR}/bench/step_bench.cpp)
foreach(name cuda_gpu_checks cuda_gpu_step_bench)
  target_link_libraries(${name} PRIVATE ${LS_CUDA_GPU_OBJECTS})
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
  set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
endforeach()
set_target_properties(ls_cuda_gpu_tests PROPERTIES EXCLUDE_FROM_ALL ON)
add_custom_target(cuda_gpu_programs DEPENDS cuda_gpu_checks cuda_gpu_step_bench)
