# Two commands on a fresh machine: `make demo` and `make test`. Both first make .venv, which needs Python 3.11 or newer only.

# Python 3.11 comes first because requirements/test-constraints.txt was made with it. `make venv PYTHON=/path/to/python` overrides.
PYTHON := $(shell for p in python3.11 python3.13 python3.12 python3; do \
	$$p -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
PIP_INSTALL = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c requirements/test-constraints.txt
PACKAGE = .[train-cpu,test]

# Without these a child process that starts here finds the folders kernels/ and planner/ as top-level packages.
export PYTHONSAFEPATH = 1
unexport PYTHONPATH

# $(call timed,name,command) runs the command and says how long it took, or fails with it.
timed = @start=$$(date +%s); $(2) && echo "$(1): $$(($$(date +%s) - start)) s"

.PHONY: venv demo lint test test-all coverage schema clean

venv: .venv/installed

.venv/installed: pyproject.toml requirements/test-constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with the modules venv and ensurepip is on PATH: install one (on" \
		"Debian and Ubuntu also the package python3-venv), or name it: make venv PYTHON=/path/to/python" >&2; exit 1; }
	@.venv/bin/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	@echo "Installing trainplan and what its tests need into .venv with $$(.venv/bin/python --version); PyTorch is the largest part"
	@# PyTorch by itself first: with it in place nothing that follows makes pip weigh other builds of it.
	$(call timed,PyTorch,$(PIP_INSTALL) torch)
	$(call timed,the rest,$(PIP_INSTALL) -e '$(PACKAGE)')
	@touch $@

demo: venv
	@.venv/bin/python -P examples/demo.py

lint: venv
	$(call timed,ruff check,.venv/bin/ruff check --quiet)
	$(call timed,ruff format,.venv/bin/ruff format --check --quiet)
	$(call timed,mypy,.venv/bin/mypy)

test: lint
	$(call timed,pytest,.venv/bin/pytest --durations=10)

# Everything but what needs a GPU; some of it downloads packages. A slow test has an hour before it counts as hanging.
test-all: lint
	$(call timed,pytest,.venv/bin/pytest --durations=20 -m 'not gpu' -o faulthandler_timeout=3600)

coverage: venv
	@.venv/bin/coverage run -m pytest --import-mode=importlib
	@.venv/bin/coverage report

# The published JSON Schema of a plan file, from the types. A test fails where it is stale.
schema: venv
	@.venv/bin/python -P -c 'import json; from trainplan.costmodel.plan import json_schema; print(json.dumps(json_schema(), indent=1))' > docs/plan.schema.json

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
