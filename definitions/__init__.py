"""The single definition of everything that has a name. Edit the .toml files in this folder. CMake creates the
files for C++, and `make generate` those for Python, Triton and the documentation, which are committed."""
