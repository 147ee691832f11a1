# The ops for C++ programs: link pagedkv::ops, and torch.ops.pagedkv.* works there (AOTInductor packages call it).
#   cmake -DCMAKE_PREFIX_PATH="$(python -c 'import torch, pagedkv_ops as p; print(torch.utils.cmake_prefix_path, p.cmake_prefix_path, sep=";")')"
#   find_package(pagedkv REQUIRED)
#   target_link_libraries(program PRIVATE pagedkv::ops)
#
# Torch's headers and libraries come with it, from the folder of TorchConfig.cmake. That file itself is not loaded:
# beside a CUDA build of torch it needs a CUDA toolkit, which these programs do not. A program that has called
# find_package(Torch) before keeps what that gave.
if(TARGET pagedkv::ops)
  return()
endif()

if(TARGET torch)
  set(_pagedkv_torch torch)
else()
  find_path(pagedkv_TORCH_DIR TorchConfig.cmake
    HINTS ${Torch_DIR} ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH PATH_SUFFIXES Torch share/cmake/Torch)
  if(NOT pagedkv_TORCH_DIR)
    set(pagedkv_FOUND FALSE)
    set(pagedkv_NOT_FOUND_MESSAGE
      "torch was not found: add the output of `python -c 'import torch; print(torch.utils.cmake_prefix_path)'` to CMAKE_PREFIX_PATH")
    return()
  endif()
  get_filename_component(_pagedkv_torch_root "${pagedkv_TORCH_DIR}/../../.." ABSOLUTE)
  set(_pagedkv_torch)
  foreach(_pagedkv_library torch torch_cpu c10)
    list(APPEND _pagedkv_torch
      "${_pagedkv_torch_root}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${_pagedkv_library}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  endforeach()
endif()

get_filename_component(_pagedkv_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
foreach(_pagedkv_library definitions C)
  add_library(pagedkv::${_pagedkv_library} SHARED IMPORTED)
  set_target_properties(pagedkv::${_pagedkv_library} PROPERTIES
    IMPORTED_LOCATION "${_pagedkv_root}/_${_pagedkv_library}.abi3.so")
endforeach()
add_library(pagedkv::ops INTERFACE IMPORTED)
# nothing in a program names a symbol of the first two, nor of a CUDA build's libtorch: they register themselves when
# they are loaded
set_target_properties(pagedkv::ops PROPERTIES INTERFACE_LINK_LIBRARIES
  "-Wl,--no-as-needed;pagedkv::definitions;pagedkv::C;${_pagedkv_torch};-Wl,--as-needed")
if(_pagedkv_torch_root)
  set_target_properties(pagedkv::ops PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
    "${_pagedkv_torch_root}/include;${_pagedkv_torch_root}/include/torch/csrc/api/include")
endif()
unset(_pagedkv_library)
unset(_pagedkv_root)
unset(_pagedkv_torch)
unset(_pagedkv_torch_root)
