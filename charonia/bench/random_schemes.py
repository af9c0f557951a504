"""The tensors of random quantised weights, in the compressed-tensors format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.errors import InvalidRequestError

SCHEMES = ("w4a16", "w4a16-zeros", "w8a16", "w8a8", "fp8", "mxfp4")
RANDOM = None  # a tensor's value: random codes
_GROUPS = (128, 64, 32)
_MX_GROUP = 32
# Standard deviation of uniformly distributed codes. FP8 codes are normally distributed numbers.
_SPREAD = {"int4": math.sqrt((16**2 - 1) / 12), "int8": math.sqrt((256**2 - 1) / 12), "mxfp4": 2.93, "fp8": 1.0}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its type in safetensors, its shape, and the value of all its elements."""

    dtype: str
    shape: tuple[int, ...]
    value: float | tuple[int, ...] | None = RANDOM


class Scheme:
    """A scheme for weights with these columns (input features) and the standard deviation `scale`."""

    def __init__(self, name: str, columns: Iterable[int], scale: float, weight_type: str) -> None:
        if name not in SCHEMES:
            raise InvalidRequestError(f"scheme {name!r} is not known; expected {', '.join(SCHEMES)}")
        self._name = name
        self._scale = scale
        self._scale_type = weight_type  # name in safetensors
        widths = set(columns)
        groups = _GROUPS if name in ("w4a16", "w4a16-zeros", "w8a16") else (_MX_GROUP,) if name == "mxfp4" else (1,)
        self._group = next((size for size in groups if all(width % size == 0 for width in widths)), 0)
        if not self._group:
            raise InvalidRequestError(
                f"scheme {name}: no groups of {' or '.join(map(str, groups))} divide all numbers of input features: "
                + ", ".join(map(str, sorted(widths)))
            )

    def config(self, unquantised: Sequence[str] = ()) -> dict[str, Any]:
        """Return quantization_config for config.json. unquantised: patterns of more modules that are not quantised."""
        weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        inputs: dict[str, Any] | None = None
        form = "pack-quantized"
        if self._name in ("w8a8", "fp8"):
            form = "int-quantized" if self._name == "w8a8" else "float-quantized"
            weights["type"] = "int" if self._name == "w8a8" else "float"
            inputs = {**weights, "strategy": "token", "dynamic": True}
        else:
            weights |= {"strategy": "group", "group_size": self._group}
        if self._name.startswith("w4a16"):
            weights |= {"num_bits": 4, "symmetric": self._name == "w4a16"}
        if self._name == "mxfp4":
            form = "mxfp4-pack-quantized"
            weights |= {"num_bits": 4, "type": "float"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *unquantised],
        }

    def tensors(self, module: str, rows: int, cols: int) -> dict[str, Tensor]:
        """Return the tensors of a module's weight [rows, cols], by name."""
        if self._name in ("w8a8", "fp8"):
            kind, dtype = ("int8", "I8") if self._name == "w8a8" else ("fp8", "F8_E4M3")
            made = {"weight": Tensor(dtype, (rows, cols)), "weight_scale": self._scales(kind, rows, 1)}
        elif self._name == "mxfp4":
            exponent = 127 + round(math.log2(self._scale / _SPREAD["mxfp4"]))
            made = {
                "weight_packed": Tensor("U8", (rows, cols // 2)),
                "weight_scale": Tensor("U8", (rows, cols // _MX_GROUP), exponent),
            }
        else:
            bits = 8 if self._name == "w8a16" else 4
            groups = cols // self._group
            made = {
                "weight_packed": Tensor("I32", (rows, cols * bits // 32)),
                "weight_scale": self._scales(f"int{bits}", rows, groups),
                "weight_shape": Tensor("I64", (2,), (rows, cols)),
            }
            if self._name == "w4a16-zeros":
                # Not 8, because weights with this zero are computed like symmetric ones.
                made["weight_zero_point"] = Tensor("I32", (-(-rows // 8), groups), 0x77777777)
        return {f"{module}.{name}": tensor for name, tensor in made.items()}

    def _scales(self, kind: str, rows: int, groups: int) -> Tensor:
        return Tensor(self._scale_type, (rows, groups), self._scale / _SPREAD[kind])
