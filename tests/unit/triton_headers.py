"""Reads Triton's C API from a header: functions with types, values of enumerations, and versions. Supports this
backend's own header (engine/triton/triton_api.h) and the public C headers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_MARK = re.compile(r"\bTRITON(?:SERVER|BACKEND)_(?:DECLSPEC|ISPEC)\b|\bCHARONIA_ENTRY_POINT\b")
_FUNCTION = re.compile(r"([\w:*\s]+?)\b(TRITON(?:SERVER|BACKEND)_\w+)\s*\(([^()]*)\)\s*$")
_ENUM = re.compile(r"enum\s+\w+\s*(?::\s*\w+\s*)?\{([^}]*)\}")
_CONSTANT = re.compile(r"inline constexpr std::uint32_t (TRITON\w+) = (\w+)\s*$")


@dataclass(frozen=True)
class Api:
    functions: dict[str, str]  # name -> return and parameter types, without parameter names
    values: dict[str, int]  # of enumerations
    version: tuple[int, int]  # of the backend API

    def digest(self) -> str:
        """Return a hash of everything that two headers must agree on."""
        lines = [f"{name} {kind}" for name, kind in sorted(self.functions.items())]
        lines += [f"{name} = {value}" for name, value in sorted(self.values.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(text: str) -> Api:
    """Return the API that one or more concatenated headers declare."""
    version = _version(text)
    code = _MARK.sub(" ", _DIRECTIVE.sub(" ", _COMMENT.sub(" ", text)))
    values = {name: value for body in _ENUM.findall(code) for name, value in _values(body).items()}
    functions: dict[str, str] = {}
    for statement in re.split(r"[;{}]", _ENUM.sub(" ", code)):
        if found := _FUNCTION.search(statement):
            returned, name, taken = found.groups()
            functions[name] = f"{_type(returned)} ({', '.join(_parameters(taken))})"
        elif constant := _CONSTANT.search(statement):
            values[constant[1]] = int(constant[2], 0)
    return Api(functions, values, version)


def read_folder(folder: Path) -> Api:
    """Read the headers of a folder with `triton/core/tritonbackend.h`."""
    files = [folder / "triton" / "core" / name for name in ("tritonserver.h", "tritonbackend.h")]
    return read("\n".join(file.read_text(encoding="utf-8") for file in files))


def _version(text: str) -> tuple[int, int]:
    own = [re.search(rf"kBackendApi{part} = (\d+);", text) for part in ("Major", "Minor")]
    public = [re.search(rf"#define TRITONBACKEND_API_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (one or other for one, other in zip(own, public, strict=True))
    assert major and minor, "the header says no version of the API"
    return int(major[1]), int(minor[1])


def _values(body: str) -> dict[str, int]:
    values: dict[str, int] = {}
    following = 0
    for entry in filter(None, (part.strip() for part in body.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        following = int(value, 0) if value else following
        values[name] = following
        following += 1
    return values


def _parameters(taken: str) -> list[str]:
    parameters = [part.strip() for part in taken.split(",")]
    if parameters in ([""], ["void"]):
        return []
    # The name is the rest after the type.
    types = [_type(re.sub(r"(?<=[\s*])\w+$", "", part)) for part in parameters]
    # const of a parameter itself does not matter to callers.
    return [one if "*" in one else one.removeprefix("const ") for one in types]


def _type(text: str) -> str:
    """Normalise the spelling of a type in C and C++."""
    text = re.sub(r"\bextern\b|\"C\"|\bstruct\b|\benum\b|\bstd::", " ", text)
    return re.sub(r"\s*\*\s*", "*", " ".join(text.split()))
