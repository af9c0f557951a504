# make serve   everything that is needed, then Triton, the four models and the gateway. MODEL=<folder, GGUF file or hub id> serves
#              another model than SmolLM2, MODEL=demo a small one without a download; docs/configuration.md lists the other variables. Ctrl-C ends it
# make chat    a chat with what make serve runs. TOOLS=<file.py>: the model may call the functions of that file
# make test    lint, types, C++ and Python unit tests, and each interface once before one server: some minutes
# make test-all    everything else: CUDA, the emulated device, sanitizers, all servers, clients, released models (downloads
#              390 MB) and containers
# make sanitize  only the C++ tests under the address, undefined-behaviour and thread sanitizers
# make generate  what follows from definitions/*.toml: Python, config.pbtxt, docs/configuration.md
# make convert MODEL=<folder or hub id> DST=<workspace>

BIN := .venv/bin
# Hundreds of processes would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve chat convert setup test test-all sanitize format generate clean distclean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup:
	@scripts/setup.sh serve

serve: setup
	@export CHARONIA_RUN_DIR="$${CHARONIA_RUN_DIR:-run}"; exec $(BIN)/charonia serve

chat: export MODEL = demo# setup then downloads no model
chat: setup
	@port=$${CHARONIA_GRPC_PORT:-$$($(BIN)/dotenv -f .env get CHARONIA_GRPC_PORT 2>/dev/null)}; \
	  exec $(BIN)/triton_client "localhost:$${port:-33337}" $${TOOLS:+--tools "$$TOOLS"}

DST ?= workspace
convert: setup
	@test -n "$$MODEL" || { echo "make convert: say which model: make convert MODEL=<folder or hub id>" >&2; exit 1; }
	@exec $(BIN)/charonia convert "$$MODEL" --dst-path "$(DST)"

test:
	@scripts/setup.sh test
	@exec scripts/test.sh fast

test-all:
	@scripts/setup.sh test-all
	@exec scripts/test.sh all

sanitize:
	@scripts/setup.sh test-all
	@exec scripts/sanitize.sh

format:
	@scripts/setup.sh test
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# Without a build: what is committed may not compile yet.
generate:
	@test -e .venv/stamps/test || scripts/setup.sh test
	@$(BIN)/python -m definitions

clean:
	rm -rf build run .pytest_cache .mypy_cache .ruff_cache .hypothesis models/smollm2/.download-*

distclean: clean
	rm -rf .venv
