# What `cmake --install` gives: libraries, public headers, the muster command, and the package that find_package(Muster)
# reads. Two export sets, because Muster::core must be usable without libtorch.
include(CMakePackageConfigHelpers)
set(MUSTER_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Muster)

function(muster_install_library target component)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${component} VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                        INSTALL_RPATH "$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS ${target} EXPORT Muster_${component}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT Muster_${component} NAMESPACE Muster:: DESTINATION ${MUSTER_PACKAGE_DIR})
endfunction()

muster_install_library(muster_core core)
set(MUSTER_COMPONENTS core)
if(TARGET muster)
  muster_install_library(muster muster)
  list(APPEND MUSTER_COMPONENTS muster)
endif()
foreach(loaded muster_mpi muster_ucx)
  if(TARGET ${loaded})
    set_target_properties(${loaded} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
    install(TARGETS ${loaded} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endforeach()

file(RELATIVE_PATH from_bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set_target_properties(muster_command PROPERTIES INSTALL_RPATH "$ORIGIN/${from_bin_to_lib}")
install(TARGETS muster_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET muster_checkpoint)
  set_target_properties(muster_checkpoint PROPERTIES
                        INSTALL_RPATH "$ORIGIN/${from_bin_to_lib}" INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS muster_checkpoint RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(FILES ${PROJECT_SOURCE_DIR}/docs/man/muster.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${PROJECT_SOURCE_DIR}/tools/completion/muster.bash
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions RENAME muster)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/muster DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/MusterConfig.cmake.in ${PROJECT_BINARY_DIR}/MusterConfig.cmake
                              INSTALL_DESTINATION ${MUSTER_PACKAGE_DIR}
                              NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/MusterConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/MusterConfig.cmake ${PROJECT_BINARY_DIR}/MusterConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/MusterTorch.cmake
        DESTINATION ${MUSTER_PACKAGE_DIR})
