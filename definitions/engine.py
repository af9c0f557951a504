"""Generates, from engine settings and attributes of models and layers, the C++ structs, the table of config.ini's keys,
the keys of layers, and the Python dataclasses that model families fill."""

from __future__ import annotations

from collections.abc import Callable

from definitions.settings import Setting, engine_settings, layer_attributes, model_attributes
from definitions.text import comment, head, literal, literals, whole

_SOURCES = ("engine_settings.toml", "model_attributes.toml")
_CPP_TYPES = {"int": "int", "bool": "bool", "string": "std::string", "ints": "std::vector<int>"}
_PYTHON_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "string": "str",
    "ints": "tuple[int, ...]",
    "floats": "tuple[float, ...]",
}
# How config.ini writes false and true.
_BOOLS = {"engine": ("False", "True"), "model": ("0", "1")}


def _described(setting: Setting) -> str:
    allowed = f"; {setting.range}" if setting.range else ""
    return setting.help + whole(allowed) + (f"; {setting.note}" if setting.note else "")


def _number(value: float) -> str:
    """Format a number as in config.ini."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- structs


def _member(setting: Setting, real: str) -> str:
    kind = {"float": real, "floats": f"std::vector<{real}>"}.get(setting.type) or _CPP_TYPES[setting.type]
    default = setting.default
    value = ""
    if setting.type == "bool":
        value = f" = {str(default).lower()}"
    elif setting.type == "string":
        value = f" = {literal(default)}" if default else ""
    elif setting.type == "float":
        value = f" = {default!r}{'F' if real == 'float' else ''}"
    elif setting.type == "int":
        value = f" = {default or 0}"
    return comment("//", _described(setting), 2) + f"  {kind} {setting.cpp_member}{value};\n"


def _struct(name: str, what: str, settings: tuple[Setting, ...], real: str) -> str:
    members = "".join(_member(setting, real) for setting in settings if not setting.ignored)
    return f"// {what}\nstruct {name} {{\n{members}}};\n"


def structs() -> str:
    return (
        head("//", *_SOURCES)
        + "#pragma once\n\n#include <string>\n#include <vector>\n\nnamespace charonia {\n\n"
        + _struct("EngineConfig", "Settings that users may change.", engine_settings(), "double")
        + "\n"
        + _struct(
            "ModelConfig",
            "Properties of a model. `charonia convert` writes them to config.ini; users do not edit them.",
            model_attributes(),
            "float",
        )
        + "\n}  // namespace charonia\n"
    )


# --- the table of keys


def _store(setting: Setting, config: str) -> str:
    """Return the function of config.cpp that checks and stores a value."""
    if setting.ignored:
        return "store_nothing"
    arguments = [f"&{config}::{setting.cpp_member}"]
    kind = setting.type
    if setting.check:
        arguments.append(setting.check)
    elif setting.choices:
        values = ", ".join(literal(each) if isinstance(each, str) else str(each) for each in setting.choices)
        arguments.append(f"one_of({{{values}}})" if kind == "int" else f"{{{values}}}")
    elif setting.above is not None and setting.max is not None:
        arguments.append(f"above_to({setting.above}, {setting.max})")
    elif setting.min is not None and setting.max is not None:
        arguments.append(f"between({setting.min}, {setting.max})")
    elif setting.min is not None:
        arguments.append(f"at_least({setting.min})")
    elif setting.above is not None:
        arguments.append(f"above({setting.above})")
    return f"store_{kind}({', '.join(arguments)})"


def default_text(setting: Setting, group: str) -> str:
    """Return the default in the format of config.ini."""
    if setting.type == "bool":
        return _BOOLS[group][setting.default]
    if setting.type == "ints":
        return "-1"  # no token
    if setting.type in ("string", "floats"):
        return setting.default or ""
    return _number(setting.default or 0)


def range_text(setting: Setting, group: str) -> str:
    """Return the allowed values as text."""
    return setting.range or " | ".join(_BOOLS[group] if group == "model" else _BOOLS[group][::-1])


def _entry(setting: Setting, group: str) -> str:
    kind = setting.type if setting.type in ("int", "float", "bool", "string") else "string"
    allowed = range_text(setting, group)
    first = ", ".join(literal(text) for text in (setting.name, kind, default_text(setting, group), allowed))
    flags = f"{'kModel' if group == 'model' else 'kUser'}, {str(setting.ignored).lower()}"
    config = "ModelConfig" if group == "model" else "EngineConfig"
    return f"{{{{{first},\n  {literals(setting.help, 2)},\n  {flags}}},\n {_store(setting, config)}}},\n"


def keys() -> str:
    table = [_entry(setting, "model") for setting in model_attributes()]
    table += [_entry(setting, "engine") for setting in engine_settings()]
    return (
        head("//", *_SOURCES) + "// Entries of the table in config.cpp, in the order of config.ini.\n" + "".join(table)
    )


# --- Python


def _field(setting: Setting) -> str:
    default = setting.default
    if setting.type in ("ints", "floats"):
        default = ()
    value = "" if setting.required else f" = {literal(default) if isinstance(default, str) else repr(default)}"
    return f"    {setting.name}: {_PYTHON_TYPES[setting.type]}{value}\n"


def layer_struct() -> str:
    what = "Properties of one layer. `charonia convert` writes them to manifest.json."
    return (
        head("//", "layer_attributes.toml")
        + "#pragma once\n\n#include <string>\n\nnamespace charonia::model {\n\n"
        + _struct("LayerAttributes", what, layer_attributes(), "float")
        + "\n}  // namespace charonia::model\n"
    )


def layer_keys() -> str:
    """Return calls of `read(key, member, allowed)`: allowed is the minimum of a number, or the choices of a text."""

    def allowed(setting: Setting) -> str:
        if setting.type == "int":
            return str(setting.min)
        return f"{{{', '.join(literal(choice) for choice in setting.choices)}}}"

    calls = (f'read("{one.name}", out.{one.cpp_member}, {allowed(one)});\n' for one in layer_attributes())
    return head("//", "layer_attributes.toml") + "".join(calls)


def python_layer_attributes() -> str:
    return (
        head("#", "layer_attributes.toml")
        + '"""The properties of a layer: the keys of an entry of `layers` in manifest.json, in its order."""\n\n'
        + "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n"
        + "@dataclass(frozen=True)\nclass LayerAttributes:\n"
        + '    """definitions/layer_attributes.toml describes the attributes."""\n\n'
        + "".join(_field(setting) for setting in layer_attributes())
    )


def python_attributes() -> str:
    return (
        head("#", "model_attributes.toml")
        + '"""The properties of a model: the read-only keys of config.ini, in its order."""\n\n'
        + "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n"
        + "@dataclass(frozen=True)\nclass ModelAttributes:\n"
        + '    """Names are those of config.ini. definitions/model_attributes.toml describes them."""\n\n'
        + "".join(_field(setting) for setting in model_attributes())
    )


FILES: dict[str, Callable[[], str]] = {
    "engine/include/charonia/generated/configs.h": structs,
    "engine/src/base/generated/config_keys.inc": keys,
    "engine/src/model/generated/layer_attributes.h": layer_struct,
    "engine/src/model/generated/layer_keys.inc": layer_keys,
    "charonia/families/model_attributes.py": python_attributes,
    "charonia/families/layer_attributes.py": python_layer_attributes,
}
