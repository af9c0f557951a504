"""Options of other servers, and their names here (docs/coming_from.md)."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperGroup

from charonia.settings import ServeSettings, env_name

HINTS = {
    # vLLM, SGLang
    "--max-model-len": "--session-len",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--token-budget",
    "--gpu-memory-utilization": "--cache-max-entry-count (a share of the memory that is free after the weights)",
    "--kv-cache-memory-bytes": "--cache-size",
    "--kv-cache-dtype": "--quant-policy (16: fp8; 8 or 4: integers; 0: not quantised)",
    "--calculate-kv-scales": "nothing: scales of keys and values come from the checkpoint, or are 1",
    "--kv-cache-dtype-skip-layers": "nothing: --quant-policy holds for all layers",
    "--tensor-parallel-size": "--tp",
    "--block-size": "--cache-block-seq-len",
    "--served-model-name": "--model-name",
    "--port": "--gateway-port",
    "--api-key": "charonia keys create NAME --file FILE, and CHARONIA_GATEWAY_KEYS_FILE=FILE",
    "--allowed-origins": "CHARONIA_GATEWAY_ALLOWED_ORIGINS",
    "--ssl-certfile": "CHARONIA_GATEWAY_TLS_CERT",
    "--ssl-keyfile": "CHARONIA_GATEWAY_TLS_KEY",
    "--enforce-eager": "--no-cuda-graphs",
    "--load-format": "nothing: the format of the weights is detected",
    "--trust-remote-code": "nothing: code of models is never run",
    "--enable-auto-tool-choice": "nothing: tools are always on",
    "--revision": "MODEL@REVISION",
    "--mem-fraction-static": "--cache-max-entry-count (a share of the memory that is free after the weights)",
    "--enable-lora": "--lora NAME=ADAPTER",
    "--lora-modules": "--lora NAME=ADAPTER",
    "--lora-paths": "--lora NAME=ADAPTER",
    "--speculative-config": "--speculative-method with --speculative-model and --speculative-tokens",
    "--speculative-algorithm": "--speculative-method",
    "--speculative-draft-model-path": "--speculative-model",
    "--speculative-num-steps": "--speculative-tokens",
    "--speculative-num-draft-tokens": "--speculative-tokens",
    "--context-length": "--session-len",
    "--max-running-requests": "--max-batch-size",
    # LMDeploy
    "--server-name": "--host",
    "--server-port": "--gateway-port",
    "--instance-num": "--max-batch-size",
    "--api-keys": "charonia keys create NAME --file FILE, and CHARONIA_GATEWAY_KEYS_FILE=FILE",
    "--max-prefill-token-num": "--token-budget",
    # llama.cpp
    "--ctx-size": "--session-len",
    "--parallel": "--max-batch-size",
    "--batch-size": "--token-budget",
    "--n-gpu-layers": "--device cuda or --device cpu: a model is on one of the two",
    "--alias": "--model-name",
    "--model-draft": "--speculative-model",
    "--spec-type": "--speculative-method",
    "--draft": "--speculative-tokens",
    "--draft-max": "--speculative-tokens",
    "--draft-min": "nothing: the engine measures which number of proposals pays",
    "--lora-scaled": "--lora NAME=ADAPTER (its scale is lora_alpha in adapter_config.json)",
    "--reasoning-budget": "thinking_budget of a request",
    "--cache-type-k": "--quant-policy (16: fp8; 8 or 4: integers; 0: not quantised)",
    "--cache-type-v": "--quant-policy (16: fp8; 8 or 4: integers; 0: not quantised)",
    "-md": "--speculative-model",
    "-ctk": "--quant-policy (16: fp8; 8 or 4: integers; 0: not quantised)",
    "-ctv": "--quant-policy (16: fp8; 8 or 4: integers; 0: not quantised)",
    "-ngl": "--device cuda or --device cpu: a model is on one of the two",
    "-np": "--max-batch-size",
}


class HintingGroup(TyperGroup):
    """Adds the hint to the error about an unknown option, and the group to a command without its group."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in self.commands or ctx.resilient_parsing:  # a shell completes the words
            return super().resolve_command(ctx, args)
        if groups := [
            f"charonia {one}" for one, group in self.commands.items() if name in getattr(group, "commands", ())
        ]:
            ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(f'{one} {name}' for one in groups)}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "possibilities"):
                name = _as_given(str(error.option_name))  # type: ignore[attr-defined]
                if remedy := _remedy(name.replace("_", "-"), error.ctx):  # type: ignore[attr-defined]
                    error.message = f"No such option: {name}: {remedy}"  # type: ignore[attr-defined]
                    error.possibilities = None
            raise


def _as_given(option: str) -> str:
    """Return the option of the command line. Click names only the first letter of one with a single dash."""
    given = (one for one in sys.argv[1:] if one in HINTS and not one.startswith("--") and one.startswith(option))
    return next(given, option)


def _remedy(option: str, ctx: Any) -> str:
    """Return what replaces an unknown option of a command; empty if nothing is known."""
    command = ctx.command
    models = {"model", "models"} & {one.name for one in command.params if one.param_type_name == "argument"}
    if models and option in ("-m", "--model", "--model-path"):
        path = ctx.command_path.removeprefix(ctx.find_root().command_path)
        return f"the model is an argument: charonia{path} MODEL"
    if option in HINTS:
        return _for_command(HINTS[option], command)
    variable = _variable(option) if command.name == "serve" else ""
    return f"set the variable {variable}" if variable else ""


def _variable(option: str) -> str:
    """Return the variable of a setting without an option; empty if there is none."""
    field = option.removeprefix("--").replace("-", "_")
    return env_name(field) if field in ServeSettings.model_fields else ""


def _for_command(hint: str, command: Any) -> str:
    """Return the hint. A command that does not have the option names the one that has it, and the variable."""
    if hint.startswith("nothing: "):
        return f"leave it out, because {hint.removeprefix('nothing: ')}"
    option = hint.split()[0]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    if not option.startswith("--") or option in known:
        return f"here {hint}"
    variable = _variable(option)
    return f"charonia serve has {option}{f' ({variable})' if variable else ''}"
