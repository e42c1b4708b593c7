# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
PORT   ?= 8000
BIN    := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard octavo/kernels/cpu/*)
PAGE    := $(wildcard web/*.* web/.npmrc web/src/*.* web/src/*/*.*)

.PHONY: serve test test-models lint format types bench compare clean help web page page-types

help:            ## what there is
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/.core page  ## build, fetch the default model, serve it on 127.0.0.1 (PORT=8000)
	$(BIN)/octavo serve --model $(MODEL) --port $(PORT)

test: $(VENV)/.test page   ## the laws and the oracles, on tiny models and on SmolLM2
	$(BIN)/python -m pytest -m "not models"

test-models: $(VENV)/.test  ## the same checks on Gemma 3 and Qwen 2.5 (fetches 1.9 GB)
	$(BIN)/python -m pytest -m models

lint: $(VENV)/.lint page-types  ## ruff and mypy, and tsc where Node is at hand
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

web: octavo/web/index.html ## build the page at / (needs Node 20.19 or newer)

# The same where Node is at hand; the server works without.
page:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory web \
	  || echo "The page at / could not be built (see above); the server works without it."; \
	else echo "No Node here: the page at / will be missing (make web needs Node 20.19 or newer)."; fi

page-types:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory web/node_modules/.package-lock.json \
	  && cd web && npm run --silent check; else echo "No Node here: the page's types are not checked."; fi

web/node_modules/.package-lock.json: web/package.json web/package-lock.json
	cd web && npm ci --silent

octavo/web/index.html: web/node_modules/.package-lock.json $(PAGE)
	cd web && npm run --silent build -- --logLevel warn
	@touch $@

format: $(VENV)/.lint ## let ruff put things in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## kernels, whole runs and the parts of a step, each beside its ceiling
	$(BIN)/python bench/kernels.py
	$(BIN)/octavo bench offline --model $(MODEL)
	$(BIN)/octavo bench kernels --model $(MODEL)
	$(BIN)/octavo bench step --model $(MODEL)

compare: $(VENV)/.bench ## side by side with llama.cpp, OpenVINO GenAI and vLLM (builds them; hours)
	$(BIN)/python bench/compare.py all

clean:           ## remove what was built
	rm -rf build dist octavo/web web/node_modules $(VENV)

# A venv per need, in one folder: the core first, then the extras on top of it.
$(BIN)/python:
	@command -v c++ >/dev/null || { echo "A C++20 compiler is needed: apt-get install g++ (or your system's)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.core: $(BIN)/python $(SOURCES)
	@echo "Building Octavo (one to three minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "Installing what the tests compare against (torch, transformers): minutes, some of it in silence."
	@echo "PyPI's torch for Linux brings CUDA, gigabytes; the CPU's makes it some 300 MB in all:"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test"
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

$(VENV)/.lint: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@
