# The ops for C++ programs: link pagedkv::ops, and torch.ops.pagedkv.* works there (AOTInductor packages call it).
#   cmake -DCMAKE_PREFIX_PATH="$(python -c 'import torch, pagedkv_ops as p; print(torch.utils.cmake_prefix_path, p.cmake_prefix_path, sep=";")')"
#   find_package(pagedkv REQUIRED)
#   target_link_libraries(program PRIVATE pagedkv::ops)
include(CMakeFindDependencyMacro)
find_dependency(Torch)

if(NOT TARGET pagedkv::ops)
  get_filename_component(_pagedkv_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  foreach(_pagedkv_library definitions C)
    add_library(pagedkv::${_pagedkv_library} SHARED IMPORTED)
    set_target_properties(pagedkv::${_pagedkv_library} PROPERTIES
      IMPORTED_LOCATION "${_pagedkv_root}/_${_pagedkv_library}.abi3.so")
  endforeach()
  add_library(pagedkv::ops INTERFACE IMPORTED)
  # nothing in a program names a symbol of these two: they register themselves when they are loaded
  set_target_properties(pagedkv::ops PROPERTIES INTERFACE_LINK_LIBRARIES
    "-Wl,--no-as-needed;pagedkv::definitions;pagedkv::C;-Wl,--as-needed;torch")
  unset(_pagedkv_library)
  unset(_pagedkv_root)
endif()
