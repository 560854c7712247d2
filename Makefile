PY := .venv/bin/python
FOLDERS := builder cli models plugins runtime

.PHONY: setup demo test lint types bench gpu-check size
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install -q -U pip
	$(PY) -m pip install -q -c constraints.txt -e '.[cpu,build]' --group dev
	mkdir -p build/typing/draftwood
	for folder in $(FOLDERS); do ln -sfn $(CURDIR)/$$folder build/typing/draftwood/$$folder; done
	touch $@

test: setup
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

size:
	@git ls-files '*.py' | xargs wc -l | sort -n
