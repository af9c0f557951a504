# Threads, Python and nlohmann/json, which every target needs.
find_package(Threads REQUIRED)
find_package(Python COMPONENTS Interpreter Development.Module REQUIRED)

# nlohmann/json is a Python package that contains its headers.
execute_process(COMMAND ${Python_EXECUTABLE} -c
  "import importlib.util as u, pathlib; print(pathlib.Path(list(u.find_spec('nlohmann_json').submodule_search_locations)[0]) / 'include')"
  OUTPUT_VARIABLE CHARONIA_JSON_INCLUDE OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE json_result)
if(json_result)
  message(FATAL_ERROR "nlohmann/json was not found: pip install nlohmann-json into ${Python_EXECUTABLE}")
endif()
