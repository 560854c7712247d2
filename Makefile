PY := .venv/bin/python
DRAFTWOOD := .venv/bin/draftwood
FOLDERS := builder cli models plugins runtime
PAIR := models/demo
BUNDLE := bundles/demo

.PHONY: setup demo test lint types bench gpu-check size
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install -q -U pip
	$(PY) -m pip install -q -c constraints.txt -e '.[cpu,build]' --group dev
	mkdir -p build/typing/draftwood
	for folder in $(FOLDERS); do ln -sfn $(CURDIR)/$$folder build/typing/draftwood/$$folder; done
	touch $@

$(BUNDLE)/manifest.json: .venv/ready $(PAIR)/target/model.safetensors $(PAIR)/draft/model.safetensors
	$(PY) build_engines.py --target $(PAIR)/target --draft $(PAIR)/draft --output $(BUNDLE)

demo: $(BUNDLE)/manifest.json
	$(DRAFTWOOD) generate $(BUNDLE) --prompt 'def fibonacci(n):' --temperature 0
	$(DRAFTWOOD) generate $(BUNDLE) --prompt 'class Stack:' --temperature 0.6 --seed 1
	$(DRAFTWOOD) generate $(BUNDLE) --prompt 'import os' --temperature 1 --seed 2
	$(DRAFTWOOD) bench $(BUNDLE) --prompts $(PAIR)/prompts.jsonl --temperature 0 --configs plain,chain:4,topk:12

test: setup
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

bench: $(BUNDLE)/manifest.json
	$(PY) benchmarks/host_time.py $(BUNDLE) --output benchmarks/results
	$(PY) benchmarks/bandwidth.py --output benchmarks/results

gpu-check: setup
	$(PY) -m pytest -m gpu

size:
	@git ls-files '*.py' | xargs wc -l | sort -n
