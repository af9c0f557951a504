"""The single definition of everything that has a name. Edit the .toml files in this folder. `make generate` creates the
files for C++, Python, Triton and the documentation, which are committed."""
