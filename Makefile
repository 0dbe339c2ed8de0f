# Guild's two main commands, `make train` and `make test`, and the steps they consist of.
#
# Each first sets up what it needs (scripts/setup.py). Nothing is installed twice.
.NOTPARALLEL:
.DEFAULT_GOAL := help

PY := .venv/bin/python
ARGS ?=
STEPS := style headers docs ptxas example packages python cpp sanitize

.PHONY: help train test bench info build wheel $(STEPS) format setup-run setup-test clean

help:
	@echo 'make train      set up, build for this machine, train the example model into runs/train'
	@echo 'make test       set up, build everything that compiles here, run every check and test'
	@echo 'make bench      time the layer beside PyTorch; ARGS="--preset qwen30b" on a GPU'
	@echo 'make info       what was built and what this machine can run'
	@echo 'make build      build for this machine, into build/run'
	@echo 'make wheel      build wheel and sdist into dist/ and try them; ARGS=--all-torches'
	@echo 'make docs       the documents as a site, into build/site'
	@echo 'make format     format the C++, CUDA and Python sources'
	@echo 'make clean      remove build/; runs/, dist/ and .venv stay'
	@echo 'steps of make test, each runnable alone: $(STEPS)'
	@echo 'variables: ARGS (passed on to guild), JOBS, PYTHON, CXX, CUDACXX, GUILD_CMAKE_ARGS'

train bench info: export GUILD_LIBRARY := $(CURDIR)/build/run/libguild_torch.so

train: build
	@echo '== training'
	@$(PY) -m guild train --out runs/train $(ARGS)

bench: build
	@$(PY) -m guild bench $(ARGS)

info: build
	@$(PY) -m guild info $(ARGS)

build: setup-run
	@$(PY) scripts/build.py run

test: setup-test
	@$(PY) scripts/steps.py all

$(STEPS) format: setup-test
	@$(PY) scripts/steps.py $@

wheel: setup-test
	@$(PY) scripts/steps.py wheel
	@$(PY) scripts/steps.py packages $(ARGS)

setup-run:
	@scripts/setup.sh run

setup-test:
	@scripts/setup.sh test

clean:
	rm -rf build
