"""engine/triton/triton_api.h agrees with Triton's public headers.

No package of PyPI or Debian contains these headers. If they are available (CHARONIA_TEST_TRITON_HEADERS, or NVIDIA's
image), they are compared. Otherwise, a declaration that was never compared fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import triton_headers
from triton_headers import Api

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "engine" / "triton" / "triton_api.h"
IMAGE = Path("/opt/tritonserver/include")  # the path in NVIDIA's images
# Api.digest() of the declarations, which were compared with the headers of releases 24.08 to 26.06. After a change of
# triton_api.h, compare with the headers of the oldest and the newest supported release, then update it.
COMPARED = "7a9ac18663e99013b530925d898c32d4f50c4219338d768291ca21a9def921c5"

PUBLIC = """
#define TRITONSERVER_API_VERSION_MINOR 34
#define TRITONBACKEND_API_VERSION_MAJOR 1
#define TRITONBACKEND_API_VERSION_MINOR 19
struct TRITONSERVER_Error;
/// A comment; with (a call).
typedef enum TRITONSERVER_kind_enum {
  TRITONSERVER_KIND_A,
  TRITONSERVER_KIND_B, TRITONSERVER_KIND_C = 8
} TRITONSERVER_Kind;
TRITONSERVER_DECLSPEC struct TRITONSERVER_Error* TRITONSERVER_Do(
    struct TRITONBACKEND_Model* model, const char* name, const int line,
    const TRITONSERVER_Kind* kinds, bool* ready);
TRITONBACKEND_ISPEC TRITONSERVER_Error* TRITONBACKEND_Begin();
"""
SAME = """
inline constexpr std::uint32_t kBackendApiMajor = 1;
inline constexpr std::uint32_t kBackendApiMinor = 19;
enum TRITONSERVER_Kind : int { TRITONSERVER_KIND_B = 1, TRITONSERVER_KIND_C = 8 };  // not A
TRITONSERVER_Error* TRITONSERVER_Do(TRITONBACKEND_Model* one, const char* name, int line, const TRITONSERVER_Kind* all,
                                    bool* ready);
CHARONIA_ENTRY_POINT TRITONSERVER_Error* TRITONBACKEND_Begin();
"""


def differences(own: Api, public: Api) -> list[str]:
    """Return functions that the backend would call wrongly, and functions that the server does not have."""
    found = [
        f"{name}: {kind}, and the public header has {public.functions.get(name)}"
        for name, kind in own.functions.items()
        if public.functions.get(name) != kind
    ]
    found += [
        f"{name} = {value}, and the public header has {public.values.get(name)}"
        for name, value in own.values.items()
        if public.values.get(name) != value
    ]
    # Triton accepts a backend with the same major version and the same or an older minor version.
    if own.version[0] != public.version[0] or own.version[1] > public.version[1]:
        found.append(f"API version {own.version}, and the public header has {public.version}")
    return found


@pytest.fixture(scope="module")
def own() -> Api:
    return triton_headers.read(OWN.read_text(encoding="utf-8"))


def test_every_declaration_is_read(own: Api) -> None:
    text = re.sub(r"//[^\n]*", "", OWN.read_text(encoding="utf-8"))
    assert (
        set(own.functions) == set(re.findall(r"\b(TRITON(?:SERVER|BACKEND)_\w+)\(", text)) and len(own.functions) > 50
    )
    assert (
        set(own.values) == set(re.findall(r"\b(TRITON(?:SERVER|BACKEND)_[A-Z\d_]+) = ", text)) and len(own.values) > 30
    )


def test_every_declaration_has_been_compared_with_public_headers(own: Api) -> None:
    assert own.digest() == COMPARED, "triton_api.h has changed: compare it with Triton's headers (docs/testing.md)"


def test_declarations_equal_the_public_headers(own: Api) -> None:
    folder = Path(os.environ.get("CHARONIA_TEST_TRITON_HEADERS") or IMAGE)
    if not (folder / "triton" / "core" / "tritonbackend.h").is_file():
        if "CHARONIA_TEST_TRITON_HEADERS" in os.environ:
            pytest.fail(f"CHARONIA_TEST_TRITON_HEADERS: there is no triton/core/tritonbackend.h in {folder}")
        pytest.skip("no headers of Triton: name the folder that has triton/core in CHARONIA_TEST_TRITON_HEADERS")
    assert differences(own, triton_headers.read_folder(folder)) == []


def test_c_and_cpp_of_the_same_api_are_the_same() -> None:
    assert differences(triton_headers.read(SAME), triton_headers.read(PUBLIC)) == []
