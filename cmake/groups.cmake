# Most of the time to compile a source goes to headers and templates that other sources also use. So sources are compiled
# in groups. add_group(LIST NAME OPTIONS SOURCE...) appends the sources to compile to the list.
function(add_group list name options)
  set(sources ${ARGN})
  if(CHARONIA_UNITY)
    set(text "")
    foreach(source ${sources})
      # Relative, so that the compiler's cache finds it in every checkout.
      file(RELATIVE_PATH relative ${PROJECT_SOURCE_DIR}/engine/src ${source})
      string(APPEND text "#include \"${relative}\"\n")
    endforeach()
    set(sources ${PROJECT_BINARY_DIR}/groups/${name}.cpp)
    file(CONFIGURE OUTPUT ${sources} @ONLY CONTENT "${text}")
  endif()
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${options}")
  set(${list} ${${list}} ${sources} PARENT_SCOPE)
endfunction()
