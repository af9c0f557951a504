"""One definition of everything that has a name. People edit the .toml files beside this one. What C++, Python, Triton
and the documentation need is generated from them by `make generate`, and committed."""
